#include "core/model/block.h"

#include <ATen/ATen.h>

namespace longstraw::core::model {

void Block::state(const at::Tensor&, const TokenPositions&, Execution&) const {}

at::Tensor scaled(const at::Tensor& x, double multiplier) { return multiplier == 1.0 ? x : x * multiplier; }

at::Tensor Norm::operator()(const at::Tensor& x, Execution& execution) const {
  return execution.rms_norm(x, *weight, eps, zero_centred);
}

}  // namespace longstraw::core::model
