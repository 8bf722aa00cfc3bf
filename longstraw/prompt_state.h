#pragma once
// What a path of segments keeps of its tokens for later ones, and the adjoint of it.
//
// Every attention layer has one buffer along the path for keys and one for values, [G, capacity, d]; a node's own
// tokens are a range of it, so the past of any node is one block. A sibling writes over the range of the node that
// was left before it. The adjoint (gradient of the loss by the state) has the same shape for the tokens from
// `adjoint_begin` on, is added to in place, and is float32 (float64 in a float64 run) whatever the state's dtype.
//
// G key/value heads, d head size, S tokens of a segment.

#include "core/model/decoder.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace longstraw {

class PromptState {
 public:
  // Room for positions 0 … capacity-1, with an adjoint for positions adjoint_begin … capacity-1.
  PromptState(const core::model::Decoder& decoder, int64_t capacity, int64_t adjoint_begin);

  int64_t capacity() const { return capacity_; }
  int64_t adjoint_begin() const { return adjoint_begin_; }

  // Views of positions [begin, begin + count), [G, count, d].
  at::Tensor keys(int64_t layer, int64_t begin, int64_t count) const;
  at::Tensor values(int64_t layer, int64_t begin, int64_t count) const;
  // Views of the adjoint; throws std::out_of_range-like c10 errors for positions before adjoint_begin.
  at::Tensor key_adjoint(int64_t layer, int64_t begin, int64_t count) const;
  at::Tensor value_adjoint(int64_t layer, int64_t begin, int64_t count) const;

  void write(int64_t layer, int64_t begin, const at::Tensor& key_SGd, const at::Tensor& value_SGd);
  // Bit for bit.
  bool holds(int64_t layer, int64_t begin, const at::Tensor& key_SGd, const at::Tensor& value_SGd) const;
  void zero_adjoint(int64_t begin, int64_t count);

  // The state belongs to the weights that made it: throws if they have changed since (an optimizer step, a load).
  void check_weights(const core::model::Decoder& decoder) const;

  int64_t state_bytes() const;
  int64_t adjoint_bytes() const;

 private:
  struct Layer {
    at::Tensor keys, values;                // [G, capacity, d]
    at::Tensor key_adjoint, value_adjoint;  // [G, capacity - adjoint_begin, d]
  };
  std::vector<Layer> layers_;
  int64_t capacity_;
  int64_t adjoint_begin_;
  uint64_t weights_version_;
};

}  // namespace longstraw
