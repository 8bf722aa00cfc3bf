#pragma once
// The MLP of a layer: down(silu(gate x) ⊗ up x), or down(act(up x)) where it has no gate.

#include "core/model/block.h"

#include <string>

namespace longstraw::core::model {

class MlpBlock final : public Block {
 public:
  // `prefix` stands before gate_proj, up_proj and down_proj (input_linear and output_linear where they are fused):
  // "model.layers.0.mlp.".
  MlpBlock(Builder& builder, const std::string& prefix, int64_t hidden, const MlpShape& shape);

  BlockShape shape() const override { return shape_; }
  at::Tensor output(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const override;

 private:
  struct Affine {
    const Parameter* weight = nullptr;
    const Parameter* bias = nullptr;  // null: none
  };
  MlpShape shape_;
  Affine gate_, input_, down_;  // input: up, or gate and up where they are fused
};

}  // namespace longstraw::core::model
