#include "longstraw/prompt_state.h"

#include "core/base/errors.h"
#include "core/device/device.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

namespace longstraw {
namespace {

// Grows with every in-place change of any weight.
uint64_t weights_version(const core::model::Decoder& decoder) {
  uint64_t version = 0;
  for (const auto& parameter : decoder.parameters()) version += parameter->value._version();
  return version;
}

}  // namespace

PromptState::PromptState(const core::model::Decoder& decoder, int64_t capacity, int64_t adjoint_begin)
    : capacity_(capacity), adjoint_begin_(std::min(adjoint_begin, capacity)), weights_version_(weights_version(decoder)) {
  const auto& architecture = decoder.architecture();
  const auto state = at::TensorOptions().dtype(decoder.dtype()).device(decoder.device());
  const auto adjoint = state.dtype(core::device::accumulation_dtype(decoder.dtype()));
  for (int64_t n = 0; n < decoder.layers(); ++n) {
    const std::array<int64_t, 3> shape{architecture.kv_heads, capacity_, architecture.head_dim};
    const std::array<int64_t, 3> adjoint_shape{architecture.kv_heads, capacity_ - adjoint_begin_, architecture.head_dim};
    Layer layer{.window = architecture.window[n],
                .blocks = {},
                .key_adjoint = at::empty(adjoint_shape, adjoint),
                .value_adjoint = at::empty(adjoint_shape, adjoint)};
    if (!layer.window) layer.blocks.push_back({0, at::empty(shape, state), at::empty(shape, state)});
    layers_.push_back(std::move(layer));
  }
}

template <class Part>
at::Tensor PromptState::gather(int64_t layer, int64_t begin, int64_t count, Part part) const {
  std::vector<at::Tensor> pieces;
  for (const Block& block : layers_[layer].blocks) {
    const int64_t from = std::max(begin, block.begin), to = std::min(begin + count, block.end());
    if (from < to) pieces.push_back((block.*part).narrow(1, from - block.begin, to - from));
  }
  at::Tensor found = pieces.size() == 1 ? pieces.front() : at::cat(pieces, 1);
  TORCH_CHECK(found.size(1) == count, "prompt state: positions ", begin, " to ", begin + count, " of layer ", layer,
              " are not all there");
  return found;
}

at::Tensor PromptState::keys(int64_t layer, int64_t begin, int64_t count) const {
  return gather(layer, begin, count, &Block::keys);
}
at::Tensor PromptState::values(int64_t layer, int64_t begin, int64_t count) const {
  return gather(layer, begin, count, &Block::values);
}
at::Tensor PromptState::key_adjoint(int64_t layer, int64_t begin, int64_t count) const {
  return layers_[layer].key_adjoint.narrow(1, begin - adjoint_begin_, count);
}
at::Tensor PromptState::value_adjoint(int64_t layer, int64_t begin, int64_t count) const {
  return layers_[layer].value_adjoint.narrow(1, begin - adjoint_begin_, count);
}

void PromptState::write(int64_t layer, int64_t begin, const at::Tensor& key_SGd, const at::Tensor& value_SGd) {
  at::NoGradGuard no_grad;
  auto& blocks = layers_[layer].blocks;
  if (!layers_[layer].window) {
    blocks.front().keys.narrow(1, begin, key_SGd.size(0)).copy_(key_SGd.transpose(0, 1));
    blocks.front().values.narrow(1, begin, key_SGd.size(0)).copy_(value_SGd.transpose(0, 1));
    return;
  }
  std::erase_if(blocks, [&](const Block& block) { return block.begin >= begin; });  // of a node that was left
  const auto copied = [](const at::Tensor& x) { return x.detach().transpose(0, 1).clone(at::MemoryFormat::Contiguous); };
  blocks.push_back({begin, copied(key_SGd), copied(value_SGd)});
}

void PromptState::forget_before(int64_t position) {
  for (Layer& layer : layers_) {
    if (!layer.window) continue;
    std::erase_if(layer.blocks, [&](const Block& block) { return block.end() <= position - *layer.window + 1; });
  }
}

bool PromptState::holds(int64_t layer, int64_t begin, const at::Tensor& key_SGd, const at::Tensor& value_SGd) const {
  return at::equal(keys(layer, begin, key_SGd.size(0)), key_SGd.detach().transpose(0, 1)) &&
         at::equal(values(layer, begin, value_SGd.size(0)), value_SGd.detach().transpose(0, 1));
}

void PromptState::zero_adjoint(int64_t begin, int64_t count) {
  for (int64_t n = 0; n < static_cast<int64_t>(layers_.size()); ++n) {
    key_adjoint(n, begin, count).zero_();
    value_adjoint(n, begin, count).zero_();
  }
}

void PromptState::check_weights(const core::model::Decoder& decoder) const {
  if (weights_version(decoder) != weights_version_) {
    throw ConfigError(
        "the prompt state was made by other weights than the model has now: capture the prompt again after "
        "an optimizer step");
  }
}

}  // namespace longstraw
