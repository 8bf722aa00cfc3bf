#include "longstraw/run_layers.h"

#include <ATen/ATen.h>

#include <numeric>

namespace longstraw {

at::Tensor run_layers(const core::model::Decoder& decoder, const std::vector<int64_t>& ids, const std::vector<int64_t>& positions,
                      core::model::SequenceLengths lengths, core::model::Execution& execution, bool with_output) {
  const auto where = decoder.positions(at::tensor(positions, at::kLong).to(decoder.device()), lengths);
  at::Tensor hidden = decoder.embed(at::tensor(ids, at::kLong).to(decoder.device()), execution);
  const int64_t whole = with_output ? decoder.layers() : decoder.layers_with_state() - 1;
  for (int64_t n = 0; n < whole; ++n) hidden = decoder.layer(n, hidden, where, execution);
  if (with_output) return decoder.final_norm(hidden, execution);
  decoder.layer_state(whole, hidden, where, execution);
  return {};
}

std::vector<int64_t> positions_from(int64_t first, int64_t count) {
  std::vector<int64_t> positions(count);
  std::iota(positions.begin(), positions.end(), first);
  return positions;
}

}  // namespace longstraw
