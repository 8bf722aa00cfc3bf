#pragma once
// Bytes that a decoder's tokens take in LongStraw's execution, by formulas that follow the operations of segment_execution.cpp,
// segment_latents.cpp, segment_recurrence.cpp and the blocks of core/model/blocks.

#include "core/model/decoder.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace longstraw {

class TokenCosts {
 public:
  explicit TokenCosts(const core::model::Decoder& decoder);

  int64_t state() const { return state_; }      // rows of all slots without a window, for each position
  int64_t choices() const { return choices_; }  // experts of all routers, for each position that is recomputed
  int64_t adjoint() const { return adjoint_; }  // of all rows that have one, for each position
  // Carried values of all slots, once a border between segments; and of their adjoint.
  int64_t border() const { return border_; }
  int64_t border_adjoint() const { return border_adjoint_; }
  struct Windowed {
    int64_t window = 0;
    int64_t row = 0;  // bytes a token
  };
  const std::vector<Windowed>& windowed() const { return windowed_; }

  // What a token's graph keeps between its forward and its backward pass.
  int64_t graph(bool with_loss) const { return with_loss ? graph_ : state_graph_; }
  // Alive a token at the widest moment of a forward pass without a graph, and of a backward pass beyond the graph.
  int64_t forward_working() const { return forward_; }
  int64_t backward_working() const { return backward_; }
  // Alive in the backward pass of a recurrent mixer's scan over `tokens` tokens, whose blocks bound it.
  int64_t scan_backward(int64_t tokens) const;
  // The loss over `tokens` tokens: a slice of logits twice, because the log-sum-exp needs a copy beside the logits; in a
  // narrow dtype the gradient of the output weight also exists before it is added to its accumulator.
  int64_t head(int64_t tokens) const;
  // Backward pass of a mixer over `past` tokens, of which those from `adjoint_from` on want an adjoint: the widest of all
  // layers, less what the layer has let go of by then.
  int64_t mixer_backward(int64_t tokens, int64_t past, int64_t adjoint_from) const;

 private:
  // A softmax mixer as its matrix products see it.
  struct Softmax {
    int64_t heads = 0, kv_heads = 0, key_dim = 0, value_dim = 0;
    std::optional<int64_t> window;
    std::optional<int64_t> listed;  // keys a query attends to, where they are selected
    int64_t released = 0;           // bytes a token of the layer's graph that are free by then
    auto operator<=>(const Softmax&) const = default;
  };
  int64_t softmax_backward(const Softmax& mixer, int64_t tokens, int64_t past, int64_t adjoint_from) const;
  void count_states(const core::model::Decoder& decoder);
  void count_layers(const core::model::Decoder& decoder);
  void count_adapters(const core::model::Decoder& decoder);

  c10::ScalarType dtype_;
  int64_t size_, wide_;
  int64_t vocab_, hidden_;
  int64_t state_ = 0, choices_ = 0, adjoint_ = 0, border_ = 0, border_adjoint_ = 0;
  int64_t graph_ = 0, state_graph_ = 0, forward_ = 0, backward_ = 0;
  struct Scan {
    int64_t block_tokens = 0, scratch = 0;  // scratch: bytes a token of a block
  };
  std::vector<Scan> scans_;
  std::vector<Windowed> windowed_;
  std::vector<Softmax> softmax_;
};

}  // namespace longstraw
