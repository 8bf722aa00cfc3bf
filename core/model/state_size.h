#pragma once
// Bytes that a prefix leaves for later tokens, by kind of mixer, from a decoder's description alone.

#include "core/model/builder.h"
#include "core/model/state.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace longstraw::core::model {

// Of all layers of one kind, or of all kinds together.
struct StateSize {
  std::string kind;
  int64_t layers = 0;
  int64_t bytes_per_token = 0;  // of rows that grow with the prefix
  int64_t fixed_bytes = 0;      // of carried values, and of rows within a full window (the last window - 1 tokens)
  int64_t bytes = 0;            // of a prefix of `tokens`
  // What an exact gradient over the prefix takes: rows of every token, within a window or not, and the adjoint of all rows
  // and carried values that have one, which is wide.
  int64_t exact_bytes = 0;
  int64_t adjoint_bytes = 0;
  int64_t border_bytes = 0;  // of carried values alone: an exact sweep keeps them once a border between segments

  StateSize& operator+=(const StateSize& other);
};

// `dtype` is the model's; what is kept wide is float32, float64 in a float64 model. In the order of the layers.
std::vector<StateSize> state_sizes(const std::vector<MixerState>& states, c10::ScalarType dtype, int64_t tokens);
StateSize total(const std::vector<StateSize>& sizes);

// Bytes a token of the chosen experts that an exact sweep stores to repeat them: 2 or 4 for each.
int64_t expert_choice_bytes(const std::vector<Router>& routers);

}  // namespace longstraw::core::model
