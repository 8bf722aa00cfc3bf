#pragma once
// A causal decoder read from a Hugging Face checkpoint folder. It knows weights and equations; it knows nothing of
// batches, masks, prompts, segments or gradients: `Execution` carries its operations out.

#include "core/model/architecture.h"
#include "core/model/block.h"
#include "core/model/execution.h"
#include "core/model/state.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace longstraw::core::model {

// What a family puts together: sizes, parameters by name, layers. No weights yet.
struct DecoderParts {
  Architecture architecture;
  Builder builder;
  const Parameter* embedding = nullptr;
  double embedding_multiplier = 1.0;
  std::vector<Layer> layers;
  Norm final_norm;
  const Parameter* output = nullptr;  // the embedding when tied
  double logit_multiplier = 1.0;
};

struct Adapters;

class Decoder {
 public:
  explicit Decoder(DecoderParts parts);
  ~Decoder();
  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;

  const Architecture& architecture() const { return parts_.architecture; }
  // What is trained: weights(), or the adapters alone where there are some (lora.h).
  const std::vector<std::shared_ptr<Parameter>>& parameters() const { return parameters_; }
  // Of the checkpoint, in the order of its layers, without constants; tied embeddings appear once, under the embedding's name.
  const std::vector<std::shared_ptr<Parameter>>& weights() const { return weights_; }
  // What is never trained: a router's balancing constant.
  std::vector<std::shared_ptr<Parameter>> constants() const;
  const std::vector<MixerState>& states() const { return parts_.builder.states; }
  const std::vector<Router>& routers() const { return parts_.builder.routers; }
  const std::vector<Layer>& blocks() const { return parts_.layers; }
  int64_t layers() const { return static_cast<int64_t>(parts_.layers.size()); }
  // One more than the last layer that leaves a state; later tokens need no layer from here on.
  int64_t layers_with_state() const;
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return device_; }
  // Changes with whatever changes what the decoder computes: a weight written in place (an optimizer step), adapters added, merged
  // or left out. Comes back to what it was when adapters that were left out are back.
  uint64_t weights_version() const;
  // Null: none.
  const Adapters* adapters() const { return adapters_.get(); }
  // SHA-256 over names, shapes and bytes of the checkpoint's tensor files, in the order of their names; and of the adapters as
  // they were added.
  const std::string& sha256() const { return sha256_; }
  // What a user should know about the files it was read from, a line each: tensors that were skipped, weights dequantized.
  const std::vector<std::string>& notes() const { return notes_; }

  TokenPositions positions(const at::Tensor& positions_S, SequenceLengths lengths) const;
  at::Tensor embed(const at::Tensor& ids_S, Execution& execution) const;
  // One layer: hidden [S, D] -> [S, D].
  at::Tensor layer(int64_t n, const at::Tensor& hidden_SD, const TokenPositions& where, Execution& execution) const;
  // Only what layer n leaves for later tokens; no output.
  void layer_state(int64_t n, const at::Tensor& hidden_SD, const TokenPositions& where, Execution& execution) const;
  // Final norm, [S, D] -> [S, D]; logits are output_weight() applied to its rows.
  at::Tensor final_norm(const at::Tensor& hidden_SD, Execution& execution) const;
  const Parameter& output_weight() const { return *parts_.output; }  // [V, D]; the embedding when tied

 private:
  friend std::unique_ptr<Decoder> load_decoder(const std::filesystem::path& folder, at::ScalarType dtype, at::Device device);
  friend void set_adapters(Decoder& decoder, std::unique_ptr<Adapters> adapters, std::vector<std::string> notes);
  at::Tensor add(const Residual& residual, const at::Tensor& hidden, const at::Tensor& update, Execution& execution) const;

  DecoderParts parts_;
  std::vector<std::shared_ptr<Parameter>> weights_;
  std::vector<std::shared_ptr<Parameter>> parameters_;
  std::unique_ptr<Adapters> adapters_;
  uint64_t adaptations_ = 0;  // how often adapters were added or merged
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
  std::string sha256_;
  std::vector<std::string> notes_;
};

// Reads config.json and the tensor files of `folder`, converts to `dtype` on `device`; the layouts that published files
// have are those of tensor_sources.h. Throws FormatError (naming file, key and value) for a checkpoint that can't be used,
// ConfigError for a model_type that is not supported.
std::unique_ptr<Decoder> load_decoder(const std::filesystem::path& folder, at::ScalarType dtype, at::Device device);

}  // namespace longstraw::core::model
