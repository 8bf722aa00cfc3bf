#include "core/model/decoder.h"

#include "core/device/device.h"
#include "core/model/adapters.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

namespace longstraw::core::model {

namespace {

// The given execution, around it the one with adapters where the decoder has some.
class Adapted {
 public:
  Adapted(Execution& execution, const Adapters* adapters) : execution_(&execution) {
    if (adapters != nullptr && adapters->left_out == 0) execution_ = &adapted_.emplace(execution, *adapters);
  }
  Adapted(const Adapted&) = delete;
  Adapted& operator=(const Adapted&) = delete;
  Execution& execution() { return *execution_; }

 private:
  std::optional<AdaptedExecution> adapted_;
  Execution* execution_;
};

}  // namespace

Decoder::Decoder(DecoderParts parts) : parts_(std::move(parts)) {}
Decoder::~Decoder() = default;
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder& Decoder::operator=(Decoder&&) noexcept = default;

uint64_t Decoder::weights_version() const {
  // In-place changes are counted from below, what else there is from above: neither can make up for the other.
  uint64_t version = adaptations_ << 40;
  for (const auto& parameter : parts_.builder.parameters) version += parameter->value._version();
  if (adapters_ == nullptr) return version;
  for (const auto& parameter : parameters_) version += parameter->value._version();
  return version + (adapters_->left_out > 0 ? uint64_t{1} << 39 : 0);
}

std::vector<std::shared_ptr<Parameter>> Decoder::constants() const {
  std::vector<std::shared_ptr<Parameter>> constants;
  for (const auto& parameter : parts_.builder.parameters) {
    if (!parameter->trained) constants.push_back(parameter);
  }
  return constants;
}

int64_t Decoder::layers_with_state() const {
  int64_t last = 0;
  for (const MixerState& state : states()) last = std::max(last, state.layer + 1);
  return last;
}

TokenPositions Decoder::positions(const at::Tensor& positions_S, SequenceLengths lengths) const {
  const at::Tensor here_S = positions_S.to(device_);
  const Rotary& rotary = architecture().rotary;
  if (rotary.dims == 0) return {here_S, {}};
  return {here_S, rotary_table(rotary_frequencies(rotary, lengths, dtype_), here_S, dtype_)};
}

at::Tensor Decoder::embed(const at::Tensor& ids_S, Execution& execution) const {
  const at::Tensor hidden_SD = execution.embedding(ids_S, *parts_.embedding);
  return parts_.embedding_multiplier == 1.0 ? hidden_SD : hidden_SD * parts_.embedding_multiplier;
}

at::Tensor Decoder::add(const Residual& residual, const at::Tensor& hidden, const at::Tensor& update, Execution& execution) const {
  const at::Tensor scaled = residual.multiplier == 1.0 ? update : update * residual.multiplier;
  return execution.add(residual.wide ? hidden.to(device::accumulation_dtype(dtype_)) : hidden, scaled);
}

at::Tensor Decoder::layer(int64_t n, const at::Tensor& hidden_SD, const TokenPositions& where, Execution& plain) const {
  Adapted adapted(plain, adapters_.get());
  Execution& execution = adapted.execution();
  at::Tensor hidden = hidden_SD;
  for (const Residual& residual : parts_.layers.at(size_t(n)).residuals) {
    const at::Tensor x_SD = residual.norm(hidden.to(dtype_), execution);
    at::Tensor update;
    for (const auto& block : residual.blocks) {
      const at::Tensor part = block->output(x_SD, where, execution);
      update = update.defined() ? update + part : part;
    }
    hidden = add(residual, hidden, update, execution);
  }
  return hidden;
}

void Decoder::layer_state(int64_t n, const at::Tensor& hidden_SD, const TokenPositions& where, Execution& plain) const {
  Adapted adapted(plain, adapters_.get());
  Execution& execution = adapted.execution();
  const auto& residuals = parts_.layers.at(size_t(n)).residuals;
  const auto with_state = [](const Residual& residual) {
    return std::any_of(residual.blocks.begin(), residual.blocks.end(), [](const auto& block) { return block->has_state(); });
  };
  // Families have their one mixer first in a layer: what comes before it would have to be run whole.
  TORCH_INTERNAL_ASSERT(std::none_of(residuals.begin() + 1, residuals.end(), with_state));
  const at::Tensor x_SD = residuals.front().norm(hidden_SD.to(dtype_), execution);
  for (const auto& block : residuals.front().blocks) block->state(x_SD, where, execution);
}

at::Tensor Decoder::final_norm(const at::Tensor& hidden_SD, Execution& execution) const {
  const at::Tensor normed_SD = parts_.final_norm(hidden_SD, execution).to(dtype_);
  return parts_.logit_multiplier == 1.0 ? normed_SD : normed_SD * parts_.logit_multiplier;
}

}  // namespace longstraw::core::model
