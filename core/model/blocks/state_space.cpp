#include "core/model/blocks/state_space.h"

#include "core/device/device.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace longstraw::core::model {

namespace {
int64_t inner(const StateSpaceShape& shape) { return shape.heads * shape.head_dim; }
int64_t groups_state(const StateSpaceShape& shape) { return shape.groups * shape.state; }
int64_t channels(const StateSpaceShape& shape) { return inner(shape) + 2 * groups_state(shape); }
at::Tensor wide(const at::Tensor& x) { return x.to(device::accumulation_dtype(x.scalar_type())); }
}  // namespace

StateSpaceBlock::StateSpaceBlock(Builder& builder, const std::string& prefix, int64_t layer, int64_t hidden, double norm_eps,
                                 const StateSpaceShape& shape)
    : shape_(shape), norm_eps_(norm_eps) {
  const int64_t inputs = inner(shape) + channels(shape) + shape.heads;
  input_weight_ = builder.parameter(prefix + "in_proj.weight", {inputs, hidden});
  input_bias_ = builder.parameter_if(shape.input_bias, prefix + "in_proj.bias", {inputs});
  convolution_weight_ = builder.parameter(prefix + "conv1d.weight", {channels(shape), 1, shape.kernel});
  convolution_bias_ = builder.parameter_if(shape.convolution_bias, prefix + "conv1d.bias", {channels(shape)});
  dt_bias_H_ = builder.parameter(prefix + "dt_bias", {shape.heads});
  log_decay_H_ = builder.parameter(prefix + "A_log", {shape.heads});
  skip_H_ = builder.parameter(prefix + "D", {shape.heads});
  norm_I_ = builder.parameter_if(shape.norm != StateSpaceShape::Norm::kNone, prefix + "norm.weight", {inner(shape)});
  output_weight_ = builder.parameter(prefix + "out_proj.weight", {hidden, inner(shape)});
  output_bias_ = builder.parameter_if(shape.output_bias, prefix + "out_proj.bias", {hidden});
  slot_ = builder.state({.layer = layer,
                         .kind = "mamba-2",
                         .carried = {{"convolution", {channels(shape), shape.kernel - 1}},
                                     {"recurrent", {shape.heads, shape.head_dim, shape.state}, /*wide=*/true}}});
}

at::Tensor StateSpaceBlock::projected(const at::Tensor& input_SD, Execution& execution) const {
  const at::Tensor projected_SR = execution.linear(scaled(input_SD, shape_.input_multiplier), *input_weight_, input_bias_);
  const auto& multipliers = shape_.projection_multipliers;
  if (std::all_of(multipliers.begin(), multipliers.end(), [](double m) { return m == 1.0; })) return projected_SR;
  // One factor a row of in_proj, in the model's dtype, as Hugging Face keeps them.
  const std::array sizes{inner(shape_), inner(shape_), groups_state(shape_), groups_state(shape_), shape_.heads};
  std::vector<at::Tensor> factors;
  for (size_t part = 0; part < sizes.size(); ++part) {
    factors.push_back(at::full({sizes[part]}, multipliers[part], projected_SR.options()));
  }
  return projected_SR * at::cat(factors);
}

StateSpaceBlock::Mixed StateSpaceBlock::mix(const at::Tensor& input_SD, Execution& execution) const {
  const at::Tensor projected_SR = projected(input_SD, execution);
  const auto parts = projected_SR.split_with_sizes({inner(shape_), channels(shape_), shape_.heads}, -1);
  const at::Tensor& gate_SI = parts[0];
  const at::Tensor mixed_SC = wide(execution.causal_convolution(slot_, parts[1], *convolution_weight_, convolution_bias_));
  const auto inputs = mixed_SC.split_with_sizes({inner(shape_), groups_state(shape_), groups_state(shape_)}, -1);
  const at::Tensor x_SHp = inputs[0].unflatten(-1, {shape_.heads, shape_.head_dim});
  const at::Tensor b_SGn = inputs[1].unflatten(-1, {shape_.groups, shape_.state});
  const at::Tensor c_SGn = inputs[2].unflatten(-1, {shape_.groups, shape_.state});

  at::Tensor dt_SH = at::softplus(wide(parts[2]) + wide(execution.value(*dt_bias_H_)));
  if (shape_.time_step_min > 0.0 || std::isfinite(shape_.time_step_max)) {
    dt_SH = at::clamp(dt_SH, shape_.time_step_min, shape_.time_step_max);
  }
  const at::Tensor a_H = -at::exp(wide(execution.value(*log_decay_H_)));
  return {execution.state_space(slot_, x_SHp, dt_SH, a_H, b_SGn, c_SGn), x_SHp, gate_SI};
}

at::Tensor StateSpaceBlock::gated(const at::Tensor& y_SI, const at::Tensor& gate_SI, Execution& execution) const {
  // Without a norm Hugging Face takes silu in the model's dtype.
  if (norm_I_ == nullptr) return y_SI * at::silu(gate_SI);
  const at::Tensor activated_SI = at::silu(wide(gate_SI));
  const at::Tensor normed_SI = shape_.norm_before_gate ? y_SI : y_SI * activated_SI;
  const int64_t norms = shape_.norm == StateSpaceShape::Norm::kGroups ? shape_.groups : 1;
  const at::Tensor grouped_SGi = normed_SI.unflatten(-1, {norms, -1});
  const at::Tensor scale_SG1 = at::rsqrt(grouped_SGi.square().mean(-1, /*keepdim=*/true) + norm_eps_);
  const at::Tensor out_SI = wide(execution.value(*norm_I_)) * (grouped_SGi * scale_SG1).flatten(-2);
  return shape_.norm_before_gate ? out_SI * activated_SI : out_SI;
}

at::Tensor StateSpaceBlock::output(const at::Tensor& input_SD, const TokenPositions&, Execution& execution) const {
  const Mixed mixed = mix(input_SD, execution);
  const at::Tensor y_SHp = mixed.out_SHp + wide(execution.value(*skip_H_)).unsqueeze(-1) * mixed.x_SHp;
  const at::Tensor out_SI = gated(y_SHp.flatten(1), mixed.gate_SI, execution).to(input_SD.scalar_type());
  return scaled(execution.linear(out_SI, *output_weight_, output_bias_), shape_.output_multiplier);
}

void StateSpaceBlock::state(const at::Tensor& input_SD, const TokenPositions&, Execution& execution) const {
  mix(input_SD, execution);
}

}  // namespace longstraw::core::model
