#pragma once
// The Mamba-2 mixer (arXiv 2405.21060), with H heads of size P in G groups of state size N:
//
//   [z | x | B | C | dt] = W_in u                      rows: H P, H P, G N, G N, H
//   [x | B | C] = silu(convolution([x | B | C]))       causal, depthwise
//   dt = clamp(softplus(dt + dt_bias)),  A = -exp(A_log)
//   y  = state_space(x, dt, A, B, C) + D x
//   out = W_out norm(y · silu(z))                      or norm(y) · silu(z), or y · silu(z): StateSpaceShape
//
// From dt and the convolution's result on everything is computed wide (float32, float64 in a float64 run), up to the cast
// before W_out. dt is made wide before its bias is added, as the kernels of mamba_ssm do it; Hugging Face's own torch code
// adds the bias and takes softplus in the model's dtype, which rounds dt in bfloat16 alone.
// State: the convolution's last K − 1 inputs, and the recurrent matrix [H, P, N] of each head.

#include "core/model/block.h"

#include <string>

namespace longstraw::core::model {

class StateSpaceBlock final : public Block {
 public:
  // `prefix` stands before in_proj, conv1d, dt_bias, A_log, D, norm and out_proj: "backbone.layers.0.mixer.".
  StateSpaceBlock(Builder& builder, const std::string& prefix, int64_t layer, int64_t hidden, double norm_eps,
                  const StateSpaceShape& shape);

  BlockShape shape() const override { return shape_; }
  at::Tensor output(const at::Tensor& input_SD, const TokenPositions& where, Execution& execution) const override;
  void state(const at::Tensor& input_SD, const TokenPositions& where, Execution& execution) const override;
  bool has_state() const override { return true; }

 private:
  struct Mixed {
    at::Tensor out_SHp;  // wide, without D x
    at::Tensor x_SHp;    // wide, after the convolution
    at::Tensor gate_SI;  // z, in the model's dtype
  };
  Mixed mix(const at::Tensor& input_SD, Execution& execution) const;
  at::Tensor projected(const at::Tensor& input_SD, Execution& execution) const;
  at::Tensor gated(const at::Tensor& y_SI, const at::Tensor& gate_SI, Execution& execution) const;

  StateSpaceShape shape_;
  double norm_eps_;
  const Parameter *input_weight_, *input_bias_;  // biases: null where there are none
  const Parameter *convolution_weight_, *convolution_bias_;
  const Parameter *dt_bias_H_, *log_decay_H_, *skip_H_;
  const Parameter* norm_I_;  // null: none
  const Parameter *output_weight_, *output_bias_;
  int64_t slot_;
};

}  // namespace longstraw::core::model
