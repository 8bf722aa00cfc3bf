#pragma once
// The golden values of fixtures/golden (made by transformers; fixtures/README.md says what each tensor is), and tiny
// random checkpoints for tests that need other shapes than the fixtures have. Tests run in the root of the checkout.

#include "core/data/rollouts.h"
#include "core/model/decoder.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace longstraw::test {

std::filesystem::path golden_folder(const std::string& variant);
std::vector<std::string> golden_variants();  // in alphabetical order; throws if there is none

// The first variant of each model_type, in alphabetical order of the variants.
std::vector<std::string> golden_families();

using Tensors = std::map<std::string, at::Tensor>;
Tensors read_tensors(const std::filesystem::path& file);
void write_tensors(const std::filesystem::path& file, const Tensors& tensors);

// golden_<tag>.safetensors of a variant ("f64", "f32"), with its inputs as a batch. Gradients under the decoder's names of
// its parameters, where the checkpoint has others (one tensor for all experts, a prefix).
struct Golden {
  Tensors tensors;
  core::data::Batch batch;                                // one prompt
  std::vector<std::vector<std::vector<double>>> weights;  // [prompt][member][token]

  bool has(const std::string& name) const { return tensors.contains(name); }
  const at::Tensor& operator[](const std::string& name) const { return tensors.at(name); }
  core::model::SequenceLengths lengths() const;
};
bool has_golden(const std::string& variant, const std::string& tag);
Golden read_golden(const std::string& variant, const std::string& tag);

// A folder that is removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// config.json of a tiny llama (2 layers, D 16, 4 heads over 2, d 4, V 32), with `changes` merged over it.
nlohmann::json tiny_config(const nlohmann::json& changes = nlohmann::json::object());
void write_json(const std::filesystem::path& file, const nlohmann::json& value);
// Writes config.json and model.safetensors with random float32 weights that depend on `seed` alone: matrices of variance
// 1/inputs, norms around 1, biases around 0.
void write_checkpoint(const std::filesystem::path& folder, const nlohmann::json& config, uint64_t seed = 1);
std::unique_ptr<core::model::Decoder> tiny_decoder(const nlohmann::json& config, at::ScalarType dtype, uint64_t seed = 1);

// One prompt of `prompt_tokens` and a response of each of the lengths, ids drawn from `seed`.
core::data::PromptGroup random_group(int64_t vocab, int64_t prompt_tokens, const std::vector<int64_t>& response_tokens,
                                     uint64_t seed);

}  // namespace longstraw::test
