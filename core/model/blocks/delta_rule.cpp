#include "core/model/blocks/delta_rule.h"

#include "core/device/device.h"

#include <ATen/ATen.h>

namespace longstraw::core::model {

DeltaRuleBlock::DeltaRuleBlock(Builder& builder, const std::string& prefix, int64_t layer, int64_t hidden, double norm_eps,
                               const DeltaRuleShape& shape)
    : shape_(shape), norm_eps_(norm_eps) {
  const int64_t keys = shape.key_heads * shape.key_dim, values = shape.value_heads * shape.value_dim;
  const int64_t channels = 2 * keys + values;
  const auto projection = [&](const char* name, int64_t rows) {
    return builder.parameter(prefix + name + ".weight", {rows, hidden});
  };
  if (shape.fused_projections) {
    qkvz_ = projection("in_proj_qkvz", channels + values);
    ba_ = projection("in_proj_ba", 2 * shape.value_heads);
  } else {
    qkv_ = projection("in_proj_qkv", channels);
    z_ = projection("in_proj_z", values);
    b_ = projection("in_proj_b", shape.value_heads);
    a_ = projection("in_proj_a", shape.value_heads);
  }
  convolution_C1K_ = builder.parameter(prefix + "conv1d.weight", {channels, 1, shape.kernel});
  decay_log_H_ = builder.parameter(prefix + "A_log", {shape.value_heads});
  decay_bias_H_ = builder.parameter(prefix + "dt_bias", {shape.value_heads});
  norm_v_ = builder.parameter(prefix + "norm.weight", {shape.value_dim});
  output_ = builder.parameter(prefix + "out_proj.weight", {hidden, values});
  slot_ = builder.state({.layer = layer,
                         .kind = "gated delta rule",
                         .window = std::nullopt,
                         .rows = {},
                         .carried = {{"convolution", {channels, shape.kernel - 1}},
                                     {"recurrent", {shape.value_heads, shape.key_dim, shape.value_dim}, /*wide=*/true}}});
}

DeltaRuleBlock::Projected DeltaRuleBlock::project_fused(const at::Tensor& x_SD, Execution& execution) const {
  const int64_t tokens = x_SD.size(0), heads = shape_.key_heads, shared_by = shape_.value_heads / shape_.key_heads;
  const int64_t key = shape_.key_dim, value = shared_by * shape_.value_dim;
  const at::Tensor qkvz_SGx = execution.linear(x_SD, *qkvz_, nullptr).view({tokens, heads, -1});
  const at::Tensor ba_SGx = execution.linear(x_SD, *ba_, nullptr).view({tokens, heads, -1});
  const auto parts = qkvz_SGx.split_with_sizes({key, key, value, value}, -1);
  return {at::cat({parts[0].flatten(1), parts[1].flatten(1), parts[2].flatten(1)}, -1),
          parts[3].reshape({tokens, shape_.value_heads, shape_.value_dim}), ba_SGx.narrow(-1, 0, shared_by).flatten(1),
          ba_SGx.narrow(-1, shared_by, shared_by).flatten(1)};
}

DeltaRuleBlock::Projected DeltaRuleBlock::project(const at::Tensor& x_SD, bool with_gate, Execution& execution) const {
  if (shape_.fused_projections) return project_fused(x_SD, execution);
  Projected projected{
      execution.linear(x_SD, *qkv_, nullptr), {}, execution.linear(x_SD, *b_, nullptr), execution.linear(x_SD, *a_, nullptr)};
  if (with_gate) {
    projected.gate_SHv = execution.linear(x_SD, *z_, nullptr).view({x_SD.size(0), shape_.value_heads, shape_.value_dim});
  }
  return projected;
}

at::Tensor DeltaRuleBlock::mix(const Projected& projected, Execution& execution) const {
  const at::ScalarType dtype = projected.mixed_SC.scalar_type(), wide = device::accumulation_dtype(dtype);
  const int64_t tokens = projected.mixed_SC.size(0), keys = shape_.key_heads * shape_.key_dim;
  const at::Tensor mixed_SC = execution.causal_convolution(slot_, projected.mixed_SC, *convolution_C1K_, nullptr);
  const at::Tensor query_SGk = mixed_SC.narrow(-1, 0, keys).unflatten(-1, {shape_.key_heads, shape_.key_dim});
  const at::Tensor key_SGk = mixed_SC.narrow(-1, keys, keys).unflatten(-1, {shape_.key_heads, shape_.key_dim});
  const at::Tensor value_SHv =
      mixed_SC.narrow(-1, 2 * keys, mixed_SC.size(-1) - 2 * keys).reshape({tokens, shape_.value_heads, shape_.value_dim});

  const at::Tensor decay_rate_H = execution.value(*decay_log_H_).to(wide).exp();
  const at::Tensor step_SH = at::softplus(projected.a_SH.to(wide) + execution.value(*decay_bias_H_).to(wide));
  const at::Tensor beta_SH = at::sigmoid(projected.b_SH).to(wide);
  return execution.gated_delta_rule(slot_, query_SGk, key_SGk, value_SHv, -decay_rate_H * step_SH, beta_SH).to(dtype);
}

at::Tensor DeltaRuleBlock::output(const at::Tensor& x_SD, const TokenPositions&, Execution& execution) const {
  const Projected projected = project(x_SD, /*with_gate=*/true, execution);
  const at::Tensor normed_SHv = execution.rms_norm(mix(projected, execution), *norm_v_, norm_eps_);
  const at::Tensor gate_SHv = at::silu(projected.gate_SHv.to(device::accumulation_dtype(x_SD.scalar_type())));
  return execution.linear((normed_SHv * gate_SHv).to(x_SD.scalar_type()).flatten(1), *output_, nullptr);
}

void DeltaRuleBlock::state(const at::Tensor& x_SD, const TokenPositions&, Execution& execution) const {
  mix(project(x_SD, /*with_gate=*/false, execution), execution);
}

}  // namespace longstraw::core::model
