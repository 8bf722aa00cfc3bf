#pragma once
// What a path of segments keeps of its tokens for later ones, and the adjoint of it. The decoder says what there is to
// keep (core/model/state.h): rows of tokens, and carried values that every segment replaces.
//
// Rows have one buffer along the path, [heads, capacity, width]; a node's own tokens are a range of it, so the past of any
// node is one block. A sibling writes over the range of the node that was left before it. A slot with a window has a block
// for each node instead, so that what no later token can see is let go of: of a long prompt that needs no gradient it keeps
// the window and one segment. The adjoint (gradient of the loss by the state) of rows is a buffer for the tokens from
// `adjoint_begin` on, added to in place; it is there from open_adjoint to close_adjoint, so that a state that waits for its
// sweep costs no adjoint. Carried values are kept at the borders of the path's nodes, each with its own adjoint. Adjoints are
// wide (float32, float64 in a float64 run) whatever the state's dtype.
//
// Beside the state it remembers the discrete choices that a recompute must repeat: the experts of every token from
// `choices_begin` on (earlier ones are not recomputed), and a hash of each segment's selection of keys.

#include "core/model/decoder.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace longstraw {

class PromptState {
 public:
  // Room for positions 0 … capacity-1; choices are remembered of positions choices_begin … capacity-1. Without an adjoint.
  PromptState(const core::model::Decoder& decoder, int64_t capacity, int64_t choices_begin);

  int64_t capacity() const { return capacity_; }
  // Makes room for positions up to `capacity`-1, where there is less; one slot's rows at a time exist twice meanwhile.
  void reserve(int64_t capacity);

  // An adjoint for positions adjoint_begin … capacity-1, of any content: zero_adjoint comes before it is added to.
  void open_adjoint(int64_t adjoint_begin);
  void close_adjoint();  // lets go of all adjoints, of rows and of carried values
  int64_t adjoint_begin() const { return adjoint_begin_; }

  int64_t kinds_of_rows(int64_t slot) const { return static_cast<int64_t>(slots_.at(slot).rows.size()); }
  // Rows of positions [begin, begin + count), [heads, count, width]: a view, or where a windowed slot has them in pieces, a
  // copy. `part` is the index into MixerState::rows.
  at::Tensor rows(int64_t slot, int64_t part, int64_t begin, int64_t count) const;
  // A view of their adjoint; throws c10 errors for positions before adjoint_begin.
  at::Tensor rows_adjoint(int64_t slot, int64_t part, int64_t begin, int64_t count) const;
  void write_rows(int64_t slot, int64_t part, int64_t begin, const at::Tensor& rows_Shw);
  bool holds_rows(int64_t slot, int64_t part, int64_t begin, const at::Tensor& rows_Shw) const;  // bit for bit
  void zero_adjoint(int64_t begin, int64_t count);

  // A carried value after tokens 0 … position-1; undefined (it means zeros) for position 0. `part` is the index into
  // MixerState::carried.
  at::Tensor carried(int64_t slot, int64_t part, int64_t position) const;
  void write_carried(int64_t slot, int64_t part, int64_t position, const at::Tensor& value);
  bool holds_carried(int64_t slot, int64_t part, int64_t position, const at::Tensor& value) const;  // bit for bit
  // Undefined while nothing was added since the value was written.
  at::Tensor carried_adjoint(int64_t slot, int64_t part, int64_t position) const;
  void add_carried_adjoint(int64_t slot, int64_t part, int64_t position, const at::Tensor& grad);

  // Experts that a router chose for the `count` tokens of the segment starting at `begin`, int64 [count, k]; undefined before
  // adjoint_begin, and if its capture had no need of that router (of the last layer, say).
  at::Tensor routes(int64_t router, int64_t begin, int64_t count) const;
  void write_routes(int64_t router, int64_t begin, const at::Tensor& chosen_Sk);
  // Hash of the keys that the segment starting at `begin` selected; none if its capture had no need to.
  std::optional<uint64_t> selection_hash(int64_t slot, int64_t begin) const;
  void write_selection_hash(int64_t slot, int64_t begin, uint64_t hash);

  // Whoever reads from now on stands at `position` or after it: windowed slots drop what is out of sight, carried values
  // before it go.
  void forget_before(int64_t position);

  // The sweep has left the node whose first token stands at `begin`: the carried values it made go, and its choices.
  void leave(int64_t begin);
  // The same, when what the node made is to be read again: only the adjoints of the carried values go.
  void leave_captured(int64_t begin);
  // Windowed slots drop the blocks of nodes that began at `position` or after it.
  void drop_blocks_from(int64_t position);

  // The state belongs to the weights that made it: throws if they have changed since (an optimizer step, a load).
  void check_weights(const core::model::Decoder& decoder) const;
  bool is_current(const core::model::Decoder& decoder) const;

  // Bytes of rows, carried values and routes held now, and of their adjoints.
  int64_t state_bytes() const;
  int64_t adjoint_bytes() const;

 private:
  struct Block {
    int64_t begin;
    at::Tensor rows;  // [heads, tokens, width]
    int64_t end() const { return begin + rows.size(1); }
  };
  struct Rows {
    std::vector<Block> blocks;  // in order of position; without a window one, [heads, capacity, width]
    int64_t heads = 0, width = 0;
    bool wants_adjoint = true;
    at::Tensor adjoint;  // [heads, capacity - adjoint_begin, width]; undefined when closed
  };
  struct Boundary {
    at::Tensor value;
    at::Tensor adjoint;
  };
  struct Slot {
    std::optional<int64_t> window;
    std::vector<Rows> rows;
    std::vector<std::map<int64_t, Boundary>> carried;  // by position
    std::map<int64_t, uint64_t> selections;            // by first position of the segment
  };

  std::vector<Slot> slots_;
  struct Routes {
    at::Tensor chosen;          // [capacity - choices_begin, k]
    std::set<int64_t> written;  // first positions of the segments that are in it
  };
  std::vector<Routes> routes_;  // by router
  at::ScalarType wide_;
  at::Device device_;
  int64_t capacity_;
  int64_t choices_begin_;
  int64_t adjoint_begin_;  // capacity when closed
  uint64_t weights_version_;
};

}  // namespace longstraw
