#include "core/model/state_size.h"

#include "core/device/device.h"

#include <algorithm>
#include <limits>

namespace longstraw::core::model {

namespace {

StateSize size_of(const MixerState& state, c10::ScalarType dtype, int64_t tokens) {
  const auto narrow_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const auto wide_bytes = static_cast<int64_t>(c10::elementSize(device::accumulation_dtype(dtype)));
  StateSize size{.kind = state.kind, .layers = 1};
  int64_t row_bytes = 0;
  for (const TokenRows& rows : state.rows) {
    row_bytes += rows.heads * rows.width * narrow_bytes;
    if (rows.adjoint) size.adjoint_bytes += rows.heads * rows.width * wide_bytes * tokens;
  }
  for (const Carried& carried : state.carried) {
    size.border_bytes += element_count(carried.shape) * (carried.wide ? wide_bytes : narrow_bytes);
    size.adjoint_bytes += element_count(carried.shape) * wide_bytes;
  }
  const int64_t seen = state.window ? std::min(tokens, *state.window - 1) : tokens;
  size.bytes_per_token = state.window ? 0 : row_bytes;
  size.fixed_bytes = size.border_bytes + (state.window ? (*state.window - 1) * row_bytes : 0);
  size.bytes = size.border_bytes + seen * row_bytes;
  size.exact_bytes = size.border_bytes + tokens * row_bytes;
  return size;
}

}  // namespace

StateSize& StateSize::operator+=(const StateSize& other) {
  layers += other.layers;
  bytes_per_token += other.bytes_per_token;
  fixed_bytes += other.fixed_bytes;
  bytes += other.bytes;
  exact_bytes += other.exact_bytes;
  adjoint_bytes += other.adjoint_bytes;
  border_bytes += other.border_bytes;
  return *this;
}

std::vector<StateSize> state_sizes(const std::vector<MixerState>& states, c10::ScalarType dtype, int64_t tokens) {
  std::vector<StateSize> kinds;
  for (const MixerState& state : states) {
    const StateSize size = size_of(state, dtype, tokens);
    const auto known = std::find_if(kinds.begin(), kinds.end(), [&](const StateSize& k) { return k.kind == state.kind; });
    if (known == kinds.end()) kinds.push_back(size);
    else *known += size;
  }
  return kinds;
}

StateSize total(const std::vector<StateSize>& sizes) {
  StateSize sum{.kind = "all"};
  for (const StateSize& size : sizes) sum += size;
  return sum;
}

int64_t expert_choice_bytes(const std::vector<Router>& routers) {
  int64_t bytes = 0;
  for (const Router& router : routers) bytes += router.chosen * (router.experts <= std::numeric_limits<int16_t>::max() ? 2 : 4);
  return bytes;
}

}  // namespace longstraw::core::model
