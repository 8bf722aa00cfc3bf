#include "tests/record/sample_record.h"

#include <fmt/format.h>
#include <stdlib.h>

#include <stdexcept>

#include "core/record/reader.h"

namespace longstraw::core::record::testing {
namespace {

constexpr std::int64_t kRows = 40, kColumns = 60, kNorm = 64;

void require(bool fine, const std::string& what) {
  if (!fine) throw std::runtime_error("step reads back differently: " + what);
}

void check_gradient(const RecordReader& record, std::int64_t step, const std::string& name, std::int64_t elements) {
  const auto gradient = record.gradient(step, name);
  require(gradient.info().elements == elements, name + ": elements");
  std::vector<double> values(static_cast<std::size_t>(elements));
  gradient.read(0, elements, values.data());
  for (std::int64_t i = 0; i < elements; ++i) require(values[i] == sample_value(step, i), name + ": values");
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "longstraw-test-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder: " + pattern);
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

RecordHeader sample_header() {
  return {.arm = "exact",
          .config_yaml = "model: {dtype: float32}\n# β\n",
          .model_sha256 = "a1",
          .data_sha256 = "b2",
          .dtype = "float32",
          .device = "cpu",
          .world_size = 1,
          .seed = 7,
          .torch_version = "2.11.0",
          .git_commit = "",
          .deterministic = true,
          .extra = {{"note", "a further attribute"}}};
}

double sample_value(std::int64_t step, std::int64_t index) {
  return static_cast<double>(static_cast<float>(0.001 * static_cast<double>(index % 977) - 0.3 * static_cast<double>(step + 1)));
}

std::vector<ResponseRecord> sample_responses(std::int64_t step) {
  std::vector<ResponseRecord> responses;
  for (std::int64_t member = 0; member < 3; ++member) {
    ResponseRecord r;
    r.prompt_id = member == 2 ? "längere id" : fmt::format("p{}", step);
    r.group = member / 2;
    r.member = member % 2;
    r.prompt_length = 100 + member;
    r.last_prompt_token = 5;
    r.advantage = 0.5 - static_cast<double>(member);
    if (member != 1) r.reward = static_cast<double>(member);
    for (std::int64_t t = 0; t < 2 + member; ++t) {
      r.tokens.push_back(10 * member + t + step);
      r.mask.push_back(t == 1 ? 0 : 1);
    }
    r.policy_logprobs.emplace(r.tokens.size(), -0.25 * static_cast<double>(member + 1));
    responses.push_back(r);
  }
  return responses;
}

std::vector<RewardRow> sample_rewards(std::int64_t step) {
  RewardRow first{
      .step = step, .split = "train", .prompt_id = "p", .member = 0, .reward = 1.5, .parts = {{"correct", 1.0}}, .length = 3};
  RewardRow second{.step = step, .split = "eval", .prompt_id = "q", .member = 1, .reward = std::nullopt, .parts = {}, .length = 4};
  if (step > 0) second.parts["format"] = 0.25;
  return {first, second};
}

void write_sample_step(RecordWriter& writer, std::int64_t step) {
  StepWriter s = writer.begin_step(step);
  std::vector<float> matrix(kRows * kColumns);
  for (std::size_t i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<float>(sample_value(step, static_cast<std::int64_t>(i)));
  s.gradient("model.layers.0.self_attn.q_proj.weight", {kRows, kColumns}, matrix.data());
  std::vector<double> norm(kNorm);
  for (std::size_t i = 0; i < norm.size(); ++i) norm[i] = sample_value(step, static_cast<std::int64_t>(i));
  s.gradient("model.norm.weight", {kNorm}, norm.data());
  for (auto& response : sample_responses(step)) s.response(std::move(response));
  s.objective({{"loss", 0.125 * static_cast<double>(step)}, {"kl", 0.0}});
  s.memory({{"peak_bytes", 1'000'000'007 + step}, {"state", 12}});
  s.timing({{"total", 2.5}, {"capture", 1.0}});
  writer.append_rewards(sample_rewards(step));
  s.commit();
}

void check_sample_step(const std::string& path, std::int64_t step, const RecordHeader& header) {
  const RecordReader record(path);
  require(record.header() == header, "header");
  require(record.gradients(step).size() == 2, "gradients");
  check_gradient(record, step, "model.layers.0.self_attn.q_proj.weight", kRows * kColumns);
  check_gradient(record, step, "model.norm.weight", kNorm);
  require(record.responses(step) == sample_responses(step), "responses");
  require(record.objective(step).at("loss") == 0.125 * static_cast<double>(step), "loss");
  require(record.memory(step).at("peak_bytes") == 1'000'000'007 + step, "peak_bytes");
  require(record.timing(step).at("total") == 2.5, "total");
  std::vector<RewardRow> of_step;
  for (const auto& row : record.rewards()) {
    if (row.step == step) of_step.push_back(row);
  }
  require(of_step == sample_rewards(step), "rewards");
}

}  // namespace longstraw::core::record::testing
