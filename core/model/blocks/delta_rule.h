#pragma once
// Gated delta rule (Gated DeltaNet, arXiv 2412.06464) as Qwen3-Next and Qwen3.5 have it. With q | k | v, z, b and a
// projections of x,
//   q | k | v ← silu(causal convolution of q | k | v)
//   β = sigmoid(b);  g = -exp(A_log) · softplus(a + dt_bias)
//   o = gated delta rule of q, k, v, g, β, head by head (execution.h)
//   out = out_proj(rms_norm(o) · silu(z))
// The norm is over one value head, before the gate. g, β in the rule, and the product with silu(z) are wide; the rest is in
// the model's dtype. State: the convolution's window over q | k | v, and the recurrent matrix of each value head, wide.

#include "core/model/block.h"

#include <string>

namespace longstraw::core::model {

class DeltaRuleBlock final : public Block {
 public:
  // `prefix` stands before in_proj_…, conv1d, A_log, dt_bias, norm and out_proj: "model.layers.0.linear_attn.".
  DeltaRuleBlock(Builder& builder, const std::string& prefix, int64_t layer, int64_t hidden, double norm_eps,
                 const DeltaRuleShape& shape);

  BlockShape shape() const override { return shape_; }
  at::Tensor output(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const override;
  void state(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const override;
  bool has_state() const override { return true; }

 private:
  struct Projected {
    at::Tensor mixed_SC;  // q | k | v of all heads
    at::Tensor gate_SHv;  // z; undefined where it is not asked for and has a projection of its own
    at::Tensor b_SH;
    at::Tensor a_SH;
  };
  Projected project(const at::Tensor& x_SD, bool with_gate, Execution& execution) const;
  // In the published layout of Qwen3-Next: one matrix for q, k, v, z and one for b, a, their rows grouped by key head.
  Projected project_fused(const at::Tensor& x_SD, Execution& execution) const;
  // Output of the rule, [S, H, v] in the model's dtype.
  at::Tensor mix(const Projected& projected, Execution& execution) const;

  DeltaRuleShape shape_;
  double norm_eps_;
  const Parameter *qkvz_ = nullptr, *ba_ = nullptr;                              // fused
  const Parameter *qkv_ = nullptr, *z_ = nullptr, *b_ = nullptr, *a_ = nullptr;  // not fused
  const Parameter* convolution_C1K_;
  const Parameter* decay_log_H_;   // A_log
  const Parameter* decay_bias_H_;  // dt_bias
  const Parameter* norm_v_;
  const Parameter* output_;
  int64_t slot_;
};

}  // namespace longstraw::core::model
