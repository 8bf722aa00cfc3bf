#pragma once
// What a path of segments keeps of its tokens for later ones, and the adjoint of it.
//
// A layer of full attention has one buffer along the path for keys and one for values, [G, capacity, d]; a node's own
// tokens are a range of it, so the past of any node is one block. A sibling writes over the range of the node that was
// left before it. A layer with a window has a block for each node instead, so that what no later token can see is let go
// of: of a long prompt that needs no gradient it keeps the window and one segment. The adjoint (gradient of the loss by
// the state) is a buffer for the tokens from `adjoint_begin` on in every layer, is added to in place, and is float32
// (float64 in a float64 run) whatever the state's dtype.
//
// G key/value heads, d head size, S tokens of a segment.

#include "core/model/decoder.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace longstraw {

class PromptState {
 public:
  // Room for positions 0 … capacity-1, with an adjoint for positions adjoint_begin … capacity-1.
  PromptState(const core::model::Decoder& decoder, int64_t capacity, int64_t adjoint_begin);

  int64_t capacity() const { return capacity_; }
  int64_t adjoint_begin() const { return adjoint_begin_; }

  // Positions [begin, begin + count), [G, count, d]: a view, or where a windowed layer has them in pieces, a copy.
  at::Tensor keys(int64_t layer, int64_t begin, int64_t count) const;
  at::Tensor values(int64_t layer, int64_t begin, int64_t count) const;
  // Views of the adjoint; throws std::out_of_range-like c10 errors for positions before adjoint_begin.
  at::Tensor key_adjoint(int64_t layer, int64_t begin, int64_t count) const;
  at::Tensor value_adjoint(int64_t layer, int64_t begin, int64_t count) const;

  void write(int64_t layer, int64_t begin, const at::Tensor& key_SGd, const at::Tensor& value_SGd);
  // Bit for bit.
  bool holds(int64_t layer, int64_t begin, const at::Tensor& key_SGd, const at::Tensor& value_SGd) const;
  void zero_adjoint(int64_t begin, int64_t count);
  // Whoever reads from now on stands at `position` or after it: windowed layers drop what is out of sight.
  void forget_before(int64_t position);

  // The state belongs to the weights that made it: throws if they have changed since (an optimizer step, a load).
  void check_weights(const core::model::Decoder& decoder) const;

 private:
  struct Block {
    int64_t begin;
    at::Tensor keys, values;  // [G, tokens, d]
    int64_t end() const { return begin + keys.size(1); }
  };
  struct Layer {
    std::optional<int64_t> window;
    std::vector<Block> blocks;              // in order of position; of full attention one, [G, capacity, d]
    at::Tensor key_adjoint, value_adjoint;  // [G, capacity - adjoint_begin, d]
  };
  template <class Part>  // &Block::keys or &Block::values
  at::Tensor gather(int64_t layer, int64_t begin, int64_t count, Part part) const;

  std::vector<Layer> layers_;
  int64_t capacity_;
  int64_t adjoint_begin_;
  uint64_t weights_version_;
};

}  // namespace longstraw
