#pragma once
// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), and its sparse form with an indexer (DeepSeek-V3.2; layers
// that share a selection: IndexShare, arXiv 2603.12201), as Hugging Face transformers computes them.
//
//   cq = rms(Wqa x);  per head [q_plain | q_rotary] = Wqb cq        or, without a query rank, = Wq x
//   [c | r] = Wkva x;  c = rms(c);  q_rotary and the one r of all heads are rotated
//   o = Wo · latent_attention(q_plain, q_rotary, c, r, Wkvb)
// The norms of the two ranks have an eps of 1e-6 whatever the model's is.
//
// Indexer: query_h = Wq_b cq, key = layer_norm(Wk x), both rotated on their first rotary_dim dimensions, weight_h =
// (Wp x)_h · Hi^-0.5 · di^-0.5 wide. It sees constants and learns nothing from the objective: everything it computes is
// outside the graph, and the gradients of its parameters are zero.
//
// State: rows [c | r] of each token, after norm and rotation; of an own indexer, its key after norm and rotation.

#include "core/model/block.h"

#include <optional>
#include <string>

namespace longstraw::core::model {

class LatentAttentionBlock final : public Block {
 public:
  // `prefix` stands before q_a_proj, kv_b_proj, indexer.wk, …: "model.layers.0.self_attn.".
  LatentAttentionBlock(Builder& builder, const std::string& prefix, int64_t layer, int64_t hidden,
                       const LatentAttentionShape& shape);

  BlockShape shape() const override { return shape_; }
  at::Tensor output(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const override;
  void state(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const override;
  bool has_state() const override { return true; }

 private:
  struct Affine {
    const Parameter* weight = nullptr;  // null: the layer has none
    const Parameter* bias = nullptr;
  };
  struct Indexer {
    const Parameter* query_b;        // [Hi · di, rq]
    const Parameter* key;            // [di, D]
    const Parameter* key_norm;       // [di]
    const Parameter* key_norm_bias;  // [di]
    const Parameter* weights;        // [Hi, D]
    IndexerSpec spec;
  };
  struct Latents {
    at::Tensor latent_Sl;
    at::Tensor rotary_key_Sr;
  };
  at::Tensor query_rank(const at::Tensor& x_SD, Execution& execution) const;  // cq, or x without a query rank
  Latents latents(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const;
  at::Tensor index_key(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const;
  void select(const at::Tensor& x_SD, const at::Tensor& query_rank_Sq, const TokenPositions& where, Execution& execution) const;

  LatentAttentionShape shape_;
  Affine query_a_;
  const Parameter* query_a_norm_ = nullptr;  // null: no query rank
  const Parameter* query_;                   // of cq, or of x
  Affine latent_;
  const Parameter* latent_norm_;
  const Parameter* kv_b_;
  Affine output_;
  LatentSpec spec_;
  std::optional<Indexer> indexer_;
};

}  // namespace longstraw::core::model
