#include "tests/support/fixture.h"

#include "core/model/checkpoint.h"
#include "core/model/registry.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <random>
#include <stdexcept>
#include <tuple>

namespace longstraw::test {

namespace fs = std::filesystem;
using core::model::StoredTensor;

namespace {
const fs::path kGolden = "fixtures/golden";

template <class T>
std::vector<T> as_vector(const at::Tensor& tensor, at::ScalarType dtype) {
  const at::Tensor flat = tensor.to(at::kCPU, dtype).contiguous();
  return {flat.data_ptr<T>(), flat.data_ptr<T>() + flat.numel()};
}
}  // namespace

fs::path golden_folder(const std::string& variant) { return kGolden / variant; }

std::vector<std::string> golden_variants() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(kGolden)) names.push_back(entry.path().filename().string());
  if (names.empty()) throw std::runtime_error("no golden values in " + kGolden.string());
  std::sort(names.begin(), names.end());
  return names;
}

Tensors read_tensors(const fs::path& path) {
  const core::model::SafetensorsFile file(path);
  Tensors tensors;
  for (const StoredTensor& tensor : file.tensors()) tensors[tensor.name] = core::model::read_tensor(file, tensor);
  return tensors;
}

void write_tensors(const fs::path& file, const Tensors& tensors) {
  std::vector<at::Tensor> kept;  // the bytes must live until they are written
  std::vector<StoredTensor> stored;
  for (const auto& [name, tensor] : tensors) {
    kept.push_back(tensor.detach().cpu().contiguous());
    const at::Tensor& t = kept.back();
    stored.push_back({name,
                      core::model::stored_dtype(t.scalar_type()),
                      t.sizes().vec(),
                      {static_cast<const std::byte*>(t.data_ptr()), size_t(t.nbytes())}});
  }
  core::model::write_safetensors(file, stored);
}

core::model::SequenceLengths Golden::lengths() const {
  core::model::SequenceLengths lengths{std::numeric_limits<int64_t>::max(), 0};
  for (const auto& group : batch) {
    for (const auto& response : group.responses) {
      const auto length = int64_t(group.prompt_ids.size() + response.completion_ids.size());
      lengths.shortest = std::min(lengths.shortest, length);
      lengths.longest = std::max(lengths.longest, length);
    }
  }
  return lengths;
}

bool has_golden(const std::string& variant, const std::string& tag) {
  return fs::exists(golden_folder(variant) / ("golden_" + tag + ".safetensors"));
}

Golden read_golden(const std::string& variant, const std::string& tag) {
  Golden golden{.tensors = read_tensors(golden_folder(variant) / ("golden_" + tag + ".safetensors")), .batch = {}, .weights = {}};
  core::data::PromptGroup group;
  group.prompt_id = variant;
  group.prompt_ids = as_vector<int64_t>(golden["input.prompt"], at::kLong);
  golden.weights.emplace_back();
  for (int g = 0; golden.has("input.resp." + std::to_string(g)); ++g) {
    core::data::Response response;
    response.completion_ids = as_vector<int64_t>(golden["input.resp." + std::to_string(g)], at::kLong);
    group.responses.push_back(std::move(response));
    golden.weights.back().push_back(as_vector<double>(golden["input.weight." + std::to_string(g)], at::kDouble));
  }
  golden.batch.push_back(std::move(group));
  return golden;
}

TemporaryFolder::TemporaryFolder() {
  std::string name = (fs::temp_directory_path() / "longstraw-XXXXXX").string();
  if (!mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

nlohmann::json tiny_config(const nlohmann::json& changes) {
  nlohmann::json config{{"model_type", "llama"},    {"num_hidden_layers", 2},   {"hidden_size", 16},
                        {"num_attention_heads", 4}, {"num_key_value_heads", 2}, {"intermediate_size", 24},
                        {"vocab_size", 32},         {"rms_norm_eps", 1e-5},     {"max_position_embeddings", 512},
                        {"rope_theta", 10000.0},    {"hidden_act", "silu"}};
  config.merge_patch(changes);
  return config;
}

void write_json(const fs::path& file, const nlohmann::json& value) {
  std::ofstream stream(file);
  stream << value.dump(1) << '\n';
  if (!stream) throw std::runtime_error("can't write " + file.string());
}

void write_checkpoint(const fs::path& folder, const nlohmann::json& config, uint64_t seed) {
  write_json(folder / "config.json", config);
  const auto parts = core::model::read_parts(folder);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  Tensors tensors;
  for (const auto& parameter : parts.builder.parameters) {
    const auto& [name, shape] = std::tie(parameter->name, parameter->shape);
    const at::Tensor noise = at::randn(shape, generator, at::kFloat);
    const bool is_norm = shape.size() == 1 && name.ends_with(".weight");
    const bool is_embedding = name.find("embed") != std::string::npos;
    const double spread = shape.size() == 1 ? 0.2 : is_embedding ? 1.0 : 1.0 / std::sqrt(double(shape.back()));
    tensors[name] = noise * spread + (is_norm ? 1.0 : 0.0);
  }
  write_tensors(folder / "model.safetensors", tensors);
}

std::unique_ptr<core::model::Decoder> tiny_decoder(const nlohmann::json& config, at::ScalarType dtype, uint64_t seed) {
  const TemporaryFolder folder;
  write_checkpoint(folder.path(), config, seed);
  return core::model::load_decoder(folder.path(), dtype, at::kCPU);
}

core::data::PromptGroup random_group(int64_t vocab, int64_t prompt_tokens, const std::vector<int64_t>& response_tokens,
                                     uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto ids = [&](int64_t count) {
    std::vector<int64_t> drawn;
    for (int64_t i = 0; i < count; ++i) drawn.push_back(int64_t(random() % uint64_t(vocab)));
    return drawn;
  };
  core::data::PromptGroup group;
  group.prompt_id = "p" + std::to_string(seed);
  group.prompt_ids = ids(prompt_tokens);
  for (const int64_t count : response_tokens) {
    core::data::Response response;
    response.completion_ids = ids(count);
    group.responses.push_back(std::move(response));
  }
  return group;
}

}  // namespace longstraw::test
