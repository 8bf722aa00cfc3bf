#include "core/model/blocks/attention.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace longstraw::core::model {

AttentionBlock::AttentionBlock(Builder& builder, const std::string& prefix, int64_t layer, int64_t hidden, double norm_eps,
                               const AttentionShape& shape)
    : shape_(shape), norm_eps_(norm_eps) {
  const auto affine = [&](const char* name, int64_t out, int64_t in, bool bias) {
    const Parameter* weight = builder.parameter(prefix + name + ".weight", {out, in});
    return Affine{weight, builder.parameter_if(bias, prefix + name + ".bias", {out})};
  };
  const int64_t queries = shape.heads * shape.head_dim, keys = shape.kv_heads * shape.head_dim;
  query_ = affine("q_proj", shape.output_gate ? 2 * queries : queries, hidden, shape.query_key_value_bias);
  key_ = affine("k_proj", keys, hidden, shape.query_key_value_bias);
  value_ = affine("v_proj", keys, hidden, shape.query_key_value_bias);
  output_ = affine("o_proj", hidden, queries, shape.output_bias);
  query_norm_ = builder.parameter_if(shape.query_key_norm, prefix + "q_norm.weight", {shape.head_dim});
  key_norm_ = builder.parameter_if(shape.query_key_norm, prefix + "k_norm.weight", {shape.head_dim});
  const int64_t slot =
      builder.state({.layer = layer,
                     .kind = shape.window ? fmt::format("sliding window of {}", *shape.window) : "full attention",
                     .window = shape.window,
                     .rows = {{"key", shape.kv_heads, shape.head_dim}, {"value", shape.kv_heads, shape.head_dim}}});
  spec_ = {.slot = slot, .scale = shape.scale, .window = shape.window};
}

at::Tensor AttentionBlock::normed(const at::Tensor& x_Shd, const Parameter* weight, Execution& execution) const {
  return weight != nullptr ? execution.rms_norm(x_Shd, *weight, norm_eps_, shape_.zero_centred_norm) : x_Shd;
}

at::Tensor AttentionBlock::rotated(const at::Tensor& x_Shd, const TokenPositions& where, Execution& execution) const {
  return shape_.rotary ? execution.rotate(x_Shd, where.rotary) : x_Shd;
}

at::Tensor AttentionBlock::keys(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const {
  at::Tensor key_SGd = execution.linear(x_SD, *key_.weight, key_.bias).view({x_SD.size(0), shape_.kv_heads, shape_.head_dim});
  key_SGd = scaled(key_SGd, shape_.key_multiplier);
  return rotated(normed(key_SGd, key_norm_, execution), where, execution);
}

at::Tensor AttentionBlock::values(const at::Tensor& x_SD, Execution& execution) const {
  return execution.linear(x_SD, *value_.weight, value_.bias).view({x_SD.size(0), shape_.kv_heads, shape_.head_dim});
}

at::Tensor AttentionBlock::output(const at::Tensor& input_SD, const TokenPositions& where, Execution& execution) const {
  const at::Tensor x_SD = scaled(input_SD, shape_.input_multiplier);
  at::Tensor query_SHd = execution.linear(x_SD, *query_.weight, query_.bias).view({x_SD.size(0), shape_.heads, -1});
  at::Tensor gate_SHd;
  if (shape_.output_gate) {
    gate_SHd = query_SHd.narrow(-1, shape_.head_dim, shape_.head_dim);
    query_SHd = query_SHd.narrow(-1, 0, shape_.head_dim);
  }
  query_SHd = rotated(normed(query_SHd, query_norm_, execution), where, execution);
  const at::Tensor key_SGd = keys(x_SD, where, execution);
  at::Tensor mixed_SHd = execution.attention(spec_, query_SHd, key_SGd, values(x_SD, execution));
  if (shape_.output_gate) mixed_SHd = mixed_SHd * at::sigmoid(gate_SHd);
  return scaled(execution.linear(mixed_SHd.flatten(1), *output_.weight, output_.bias), shape_.output_multiplier);
}

void AttentionBlock::state(const at::Tensor& input_SD, const TokenPositions& where, Execution& execution) const {
  const at::Tensor x_SD = scaled(input_SD, shape_.input_multiplier);
  const at::Tensor key_SGd = keys(x_SD, where, execution);
  execution.keep_keys_values(spec_, key_SGd, values(x_SD, execution));
}

}  // namespace longstraw::core::model
