#include "tests/support/fixture.h"

#include "core/model/checkpoint.h"
#include "core/model/json_reader.h"
#include "core/model/registry.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <random>
#include <set>
#include <stdexcept>

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

// A gradient of the file under the names and shapes of the decoder's parameters: the language model's part of a multimodal
// checkpoint, and every expert for itself where a file holds all of them in one tensor (gate rows before up rows).
void add_gradient(Tensors& tensors, const std::string& stored_name, const at::Tensor& stored) {
  const std::string prefix = "model.language_model.", fused_input = ".experts.gate_up_proj", fused_output = ".experts.down_proj";
  std::string name = stored_name;
  if (const size_t at = name.find(prefix); at != std::string::npos) name.replace(at, prefix.size(), "model.");
  const bool input = name.ends_with(fused_input), output = name.ends_with(fused_output);
  if (!input && !output) {
    tensors[name] = stored;
    return;
  }
  const std::string before = name.substr(0, name.rfind('.') + 1);  // "….experts."
  for (int64_t expert = 0; expert < stored.size(0); ++expert) {
    const std::string one = before + std::to_string(expert);
    if (output) {
      tensors[one + ".down_proj.weight"] = stored[expert];
    } else {
      const auto halves = stored[expert].chunk(2, 0);
      tensors[one + ".gate_proj.weight"] = halves[0];
      tensors[one + ".up_proj.weight"] = halves[1];
    }
  }
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

std::vector<std::string> golden_families() {
  std::vector<std::string> firsts;
  std::set<std::string> seen;
  for (const std::string& variant : golden_variants()) {
    const auto config = core::model::read_json((golden_folder(variant) / "config.json").string());
    if (seen.insert(config.text("model_type")).second) firsts.push_back(variant);
  }
  return firsts;
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
  Golden golden;
  for (const auto& [name, tensor] : read_tensors(golden_folder(variant) / ("golden_" + tag + ".safetensors"))) {
    if (name.find(".grad.") != std::string::npos) add_gradient(golden.tensors, name, tensor);
    else golden.tensors[name] = tensor;
  }
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

namespace {
// Matrices of variance 1/inputs, norms around 1, biases around 0; decays of which half the heads are slow, so that a recurrent
// state crosses a prompt.
at::Tensor random_weight(const std::string& name, const core::model::Shape& shape, at::Generator& generator) {
  const at::Tensor noise = at::randn(shape, generator, at::kFloat);
  if (name.ends_with("A_log")) return (0.01 + 2.0 * at::rand(shape, generator, at::kFloat).pow(3)).log();
  if (name.ends_with("dt_bias")) return 0.5 * noise - 1.0;
  if (name.ends_with(".D")) return 1.0 + 0.2 * noise;
  if (name.ends_with("e_score_correction_bias")) return 0.05 * noise;
  if (name.ends_with("conv1d.weight")) return 0.4 * noise;
  const bool is_norm = shape.size() == 1 && name.ends_with(".weight");
  const bool is_embedding = name.find("embed") != std::string::npos;
  const double spread = shape.size() == 1 ? 0.2 : is_embedding ? 1.0 : 1.0 / std::sqrt(double(shape.back()));
  return noise * spread + (is_norm ? 1.0 : 0.0);
}
}  // namespace

void write_checkpoint(const fs::path& folder, const nlohmann::json& config, uint64_t seed) {
  write_json(folder / "config.json", config);
  const auto parts = core::model::read_parts(folder);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  Tensors tensors;
  for (const auto& parameter : parts.builder.parameters) {
    tensors[parameter->name] = random_weight(parameter->name, parameter->shape, generator);
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
