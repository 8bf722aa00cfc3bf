#pragma once
// The reference's way to carry out a decoder's operations: one whole sequence from its first token, explicit boolean masks,
// textbook softmax
//
//   attention(q, k, v)_i = Σ_j softmax_j(scale · q_i · k_j) v_j     over the visible j
//
// in the run's own dtype, the softmax itself in float32 for bfloat16 (and cast back, as Hugging Face does). Or, where
// the S × S scores are too large, LibTorch's scaled_dot_product_attention. Recurrences run token by token with plain
// autograd, latent keys and values are expanded, a sparse selection is a mask over all scores, experts are a loop.
//
// A cut makes a constant of what tokens 0 … cut - 1 leave for later ones, and of nothing else: their keys and values, their
// latents and rotary keys (kv_b still gets gradients from them), their columns of a convolution's input where a later token
// reads them, and the recurrent state after them.
//
// S tokens, H query or value heads, G key/value heads or groups, d head size; execution.h has the other suffixes.

#include "core/model/execution.h"
#include "reference/config.h"

#include <map>
#include <optional>

namespace longstraw::reference {

class WholeSequence : public core::model::Execution {
 public:
  // 0 cuts nothing.
  WholeSequence(Attention attention, int64_t cut) : attention_(attention), cut_(cut) {}

  at::Tensor attention(const core::model::AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                       const at::Tensor& value_SGd) override;
  at::Tensor latent_attention(const core::model::LatentSpec& spec, const at::Tensor& query_plain_SHn,
                              const at::Tensor& query_rotary_SHr, const at::Tensor& latent_Sl, const at::Tensor& rotary_key_Sr,
                              const core::model::Parameter& kv_b) override;
  void select_keys(const core::model::IndexerSpec& spec, const at::Tensor& query_Shd, const at::Tensor& key_Sd,
                   const at::Tensor& weight_Sh) override;
  // Of the latest select_keys: bool [S, S], whether query i may attend to key j. Undefined before the first.
  const at::Tensor& selection() const { return selected_SS_; }
  at::Tensor selected_keys(int64_t begin, int64_t count) const override;

  at::Tensor causal_convolution(int64_t slot, const at::Tensor& x_SC, const core::model::Parameter& weight_C1K,
                                const core::model::Parameter* bias_C) override;
  at::Tensor gated_delta_rule(int64_t slot, const at::Tensor& query_SGk, const at::Tensor& key_SGk, const at::Tensor& value_SHv,
                              const at::Tensor& log_decay_SH, const at::Tensor& beta_SH) override;
  at::Tensor state_space(int64_t slot, const at::Tensor& x_SHp, const at::Tensor& dt_SH, const at::Tensor& a_H,
                         const at::Tensor& b_SGn, const at::Tensor& c_SGn) override;

  at::Tensor choose_experts(int64_t router, const at::Tensor& scores_SE, int64_t k) override;
  at::Tensor experts(const at::Tensor& x_SD, const at::Tensor& chosen_Sk, const at::Tensor& weights_Sk,
                     const core::model::ExpertWeights& experts) override;

  // The reference keeps no state between runs: never called.
  void keep_keys_values(const core::model::AttentionSpec& spec, const at::Tensor& key_SGd, const at::Tensor& value_SGd) override;
  void keep_latents(const core::model::LatentSpec& spec, const at::Tensor& latent_Sl, const at::Tensor& rotary_key_Sr) override;
  void keep_index_keys(const core::model::IndexerSpec& spec, const at::Tensor& key_Sd) override;

 private:
  // [H, S, v]; `mask_SS` undefined: all j <= i.
  at::Tensor attend(const at::Tensor& query_HSd, const at::Tensor& key_HSd, const at::Tensor& value_HSv, const at::Tensor& mask_SS,
                    double scale);
  const at::Tensor& visible(std::optional<int64_t> window, const at::Tensor& query_HSd);

  Attention attention_;
  int64_t cut_;
  std::map<std::optional<int64_t>, at::Tensor> visible_SS_;  // by window; [query, key]
  at::Tensor selected_SS_;
};

}  // namespace longstraw::reference
