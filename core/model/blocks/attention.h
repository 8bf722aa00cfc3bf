#pragma once
// Softmax attention with grouped heads: o = Wo · attention(rotate(norm(Wq x)), rotate(norm(Wk x)), Wv x), and the variants
// that AttentionShape names. State: keys after norm and rotation, and values.

#include "core/model/block.h"

#include <string>

namespace longstraw::core::model {

class AttentionBlock final : public Block {
 public:
  // `prefix` stands before q_proj, k_proj, v_proj, o_proj, q_norm and k_norm: "model.layers.0.self_attn.".
  AttentionBlock(Builder& builder, const std::string& prefix, int64_t layer, int64_t hidden, double norm_eps,
                 const AttentionShape& shape);

  BlockShape shape() const override { return shape_; }
  at::Tensor output(const at::Tensor& input_SD, const TokenPositions& where, Execution& execution) const override;
  void state(const at::Tensor& input_SD, const TokenPositions& where, Execution& execution) const override;
  bool has_state() const override { return true; }

 private:
  struct Affine {
    const Parameter* weight = nullptr;
    const Parameter* bias = nullptr;  // null: none
  };
  at::Tensor normed(const at::Tensor& x_Shd, const Parameter* weight, Execution& execution) const;
  at::Tensor rotated(const at::Tensor& x_Shd, const TokenPositions& where, Execution& execution) const;
  at::Tensor keys(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const;
  at::Tensor values(const at::Tensor& x_SD, Execution& execution) const;

  AttentionShape shape_;
  double norm_eps_;
  Affine query_, key_, value_, output_;
  const Parameter* query_norm_;  // null: none
  const Parameter* key_norm_;
  AttentionSpec spec_;
};

}  // namespace longstraw::core::model
