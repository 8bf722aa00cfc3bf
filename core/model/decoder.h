#pragma once
// A causal decoder read from a Hugging Face checkpoint folder. It knows weights and equations; it knows nothing of
// batches, masks, prompts, segments or gradients: `Execution` carries its operations out.

#include "core/model/architecture.h"
#include "core/model/execution.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace longstraw::core::model {

// What all layers of one run share about where its tokens stand.
struct TokenPositions {
  at::Tensor positions_S;  // int64, absolute position of each token in its sequence
  RotaryTable rotary;
};

class Decoder {
 public:
  virtual ~Decoder() = default;

  const Architecture& architecture() const { return architecture_; }
  // In the order of the checkpoint's layers; tied embeddings appear once, under the embedding's name.
  const std::vector<std::shared_ptr<Parameter>>& parameters() const { return parameters_; }
  int64_t layers() const { return architecture_.layers; }
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return device_; }
  // SHA-256 over names, shapes and bytes of the checkpoint's tensor files, in the order of their names.
  const std::string& sha256() const { return sha256_; }

  virtual TokenPositions positions(const at::Tensor& positions_S, SequenceLengths lengths) const = 0;
  virtual at::Tensor embed(const at::Tensor& ids_S, Execution& execution) const = 0;
  // One layer: hidden [S, D] -> [S, D].
  virtual at::Tensor layer(int64_t n, const at::Tensor& hidden_SD, const TokenPositions& where, Execution& execution) const = 0;
  // Only what layer n leaves for later tokens; no output.
  virtual void layer_state(int64_t n, const at::Tensor& hidden_SD, const TokenPositions& where, Execution& execution) const = 0;
  // Final norm, [S, D] -> [S, D]; logits are output_weight() applied to its rows.
  virtual at::Tensor final_norm(const at::Tensor& hidden_SD, Execution& execution) const = 0;
  virtual const Parameter& output_weight() const = 0;  // [V, D]; the embedding when tied

 protected:
  Architecture architecture_;
  std::vector<std::shared_ptr<Parameter>> parameters_;
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
  std::string sha256_;
};

// Reads config.json and the tensor files of `folder`, converts to `dtype` on `device`. Throws FormatError (naming
// file, key and value) for a checkpoint that can't be used, ConfigError for a model_type that is not supported.
std::unique_ptr<Decoder> load_decoder(const std::filesystem::path& folder, at::ScalarType dtype, at::Device device);

}  // namespace longstraw::core::model
