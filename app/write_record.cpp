#include "app/write_record.h"

#include "app/build_info.h"
#include "app/interrupt.h"

#include "core/config/load.h"
#include "core/record/writer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <algorithm>

namespace longstraw::app {
namespace {

using core::data::Batch;
using core::data::Response;
using core::record::ResponseRecord;

core::record::RecordHeader header_of(const RecordedStep& step) {
  return {.arm = step.arm,
          .config_yaml = core::config::dump(step.config),
          .model_sha256 = step.decoder.sha256(),
          .data_sha256 = core::data::data_sha256(step.batch),
          .dtype = std::string(core::config::name_of(step.config.model.dtype)),
          .device = step.decoder.device().is_cpu() ? "cpu" : "cuda",
          .world_size = 1,
          .seed = int64_t(step.config.rollout.seed),
          .torch_version = TORCH_VERSION,
          .git_commit = kGitCommit,
          .deterministic = true,
          .extra = {}};
}

void write_gradients(core::record::StepWriter& writer, const RecordedStep& step) {
  const auto& parameters = step.decoder.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor gradient = step.result.gradients[i].to(at::kCPU).contiguous();
    const std::vector<int64_t> shape = gradient.sizes().vec();
    if (gradient.scalar_type() == at::kDouble) {
      writer.gradient(parameters[i]->name, shape, gradient.const_data_ptr<double>());
    } else {
      writer.gradient(parameters[i]->name, shape, gradient.const_data_ptr<float>());
    }
  }
}

// A column is recorded when every response has it.
bool all_have(const Batch& batch, std::optional<std::vector<double>> Response::*column) {
  return std::all_of(batch.begin(), batch.end(), [&](const auto& group) {
    return std::all_of(group.responses.begin(), group.responses.end(), [&](const Response& r) { return (r.*column).has_value(); });
  });
}

std::vector<ResponseRecord> responses_of(const RecordedStep& step) {
  const bool old = all_have(step.batch, &Response::old_logprobs), reference = all_have(step.batch, &Response::ref_logprobs);
  std::vector<ResponseRecord> all;
  for (size_t g = 0; g < step.batch.size(); ++g) {
    const auto& group = step.batch[g];
    for (size_t m = 0; m < group.responses.size(); ++m) {
      const Response& response = group.responses[m];
      ResponseRecord record{.prompt_id = group.prompt_id,
                            .group = int64_t(g),
                            .member = int64_t(m),
                            .prompt_length = int64_t(group.prompt_ids.size()),
                            .last_prompt_token = group.prompt_ids.back(),
                            .tokens = response.completion_ids,
                            .mask = std::vector<uint8_t>(response.completion_ids.size(), 1),
                            .policy_logprobs = step.result.logprobs[g][m],
                            .old_logprobs = {},
                            .reference_logprobs = {},
                            .trace = {},
                            .reward = response.reward,
                            .advantage = step.result.advantages[g][m]};
      if (response.completion_mask) record.mask = *response.completion_mask;
      if (old) record.old_logprobs = response.old_logprobs;
      if (reference) record.reference_logprobs = response.ref_logprobs;
      if (!step.result.traces.empty()) record.trace = step.result.traces[g][m];
      all.push_back(std::move(record));
    }
  }
  return all;
}

// The reference computes nothing again, so it has nothing to check.
std::map<std::string, int64_t> checks_of(const core::model::StepGradient& result) {
  std::map<std::string, int64_t> checks;
  for (const char* name : {"changed_choices", "recompute_mismatches"}) {
    const auto found = result.facts.find(name);
    if (found != result.facts.end()) checks[name] = int64_t(found->second);
  }
  return checks;
}

std::vector<core::record::RewardRow> reward_rows(const Batch& batch) {
  std::vector<core::record::RewardRow> rows;
  for (const auto& group : batch) {
    for (size_t m = 0; m < group.responses.size(); ++m) {
      const Response& response = group.responses[m];
      if (!response.reward) continue;
      rows.push_back({.step = 0,
                      .split = "train",
                      .prompt_id = group.prompt_id,
                      .member = int64_t(m),
                      .reward = response.reward,
                      .parts = {},
                      .length = int64_t(response.completion_ids.size())});
    }
  }
  return rows;
}

}  // namespace

void write_record(const std::filesystem::path& path, const RecordedStep& step) {
  const WritingResults signals_wait;
  core::record::RecordWriter writer(path.string(), header_of(step), {.replace = true});
  core::record::StepWriter out = writer.begin_step(0);
  write_gradients(out, step);
  for (auto& response : responses_of(step)) out.response(std::move(response));
  std::map<std::string, double> objective = step.result.loss_parts;
  objective["loss"] = step.result.loss;
  objective.insert(step.result.facts.begin(), step.result.facts.end());
  out.objective(objective);
  out.memory(step.result.bytes);
  out.timing(step.result.seconds);
  if (const auto checks = checks_of(step.result); !checks.empty()) out.checks(checks);
  writer.append_rewards(reward_rows(step.batch));
  out.commit();
  writer.close();
}

}  // namespace longstraw::app
