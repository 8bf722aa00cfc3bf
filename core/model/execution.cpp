#include "core/model/execution.h"

#include <ATen/ATen.h>

namespace longstraw::core::model {

at::Tensor ExpertWeight::of(const at::Tensor& whole) const {
  const at::Tensor one = expert ? whole.select(0, *expert) : whole;
  return rows < 0 ? one : one.narrow(0, row, rows);
}

at::Tensor Execution::value(const Parameter& parameter) { return parameter.value; }

at::Tensor Execution::embedding(const at::Tensor& ids_S, const Parameter& weight_VD) {
  return at::embedding(weight_VD.value, ids_S);
}

at::Tensor Execution::linear(const at::Tensor& x, const Parameter& weight_OI, const Parameter* bias_O) {
  return at::linear(x, weight_OI.value, bias_O ? std::optional<at::Tensor>(bias_O->value) : std::nullopt);
}

at::Tensor Execution::rms_norm(const at::Tensor& x, const Parameter& weight, double eps, bool zero_centred) {
  const at::Tensor x32 = x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
  const at::Tensor normed = x32 * at::rsqrt(x32.square().mean(-1, /*keepdim=*/true) + eps);
  if (zero_centred) return (normed * (1.0 + weight.value.to(x32.scalar_type()))).to(x.scalar_type());
  return weight.value * normed.to(x.scalar_type());
}

at::Tensor Execution::swiglu(const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate) * up; }

at::Tensor Execution::rotate(const at::Tensor& x_Shd, const RotaryTable& table) {
  const int64_t r = table.cos_Sr.size(-1);
  const at::Tensor cos_S1r = table.cos_Sr.unsqueeze(1);
  const at::Tensor sin_S1r = table.sin_Sr.unsqueeze(1);
  const at::Tensor x_Shr = x_Shd.narrow(-1, 0, r);
  const at::Tensor half_turned = at::cat({-x_Shr.narrow(-1, r / 2, r / 2), x_Shr.narrow(-1, 0, r / 2)}, -1);
  const at::Tensor rotated = x_Shr * cos_S1r + half_turned * sin_S1r;
  return r == x_Shd.size(-1) ? rotated : at::cat({rotated, x_Shd.narrow(-1, r, x_Shd.size(-1) - r)}, -1);
}

at::Tensor Execution::add(const at::Tensor& hidden, const at::Tensor& update) { return hidden + update; }

at::Tensor Execution::selected_keys(int64_t, int64_t) const { return {}; }

}  // namespace longstraw::core::model
