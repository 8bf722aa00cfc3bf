#pragma once
// An execution that hands every operation to another one, for those that add to one or change one: derive from it and
// override what differs. The other execution must outlive it.

#include "core/model/execution.h"

namespace longstraw::core::model {

class DelegatingExecution : public Execution {
 public:
  explicit DelegatingExecution(Execution& execution) : execution_(execution) {}

  at::Tensor value(const Parameter& parameter) override;
  at::Tensor embedding(const at::Tensor& ids_S, const Parameter& weight_VD) override;
  at::Tensor linear(const at::Tensor& x, const Parameter& weight_OI, const Parameter* bias_O) override;
  at::Tensor rms_norm(const at::Tensor& x, const Parameter& weight, double eps, bool zero_centred) override;
  at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) override;
  at::Tensor rotate(const at::Tensor& x_Shd, const RotaryTable& table) override;
  at::Tensor add(const at::Tensor& hidden, const at::Tensor& update) override;
  at::Tensor attention(const AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                       const at::Tensor& value_SGd) override;
  void keep_keys_values(const AttentionSpec& spec, const at::Tensor& key_SGd, const at::Tensor& value_SGd) override;
  at::Tensor latent_attention(const LatentSpec& spec, const at::Tensor& query_plain_SHn, const at::Tensor& query_rotary_SHr,
                              const at::Tensor& latent_Sl, const at::Tensor& rotary_key_Sr, const Parameter& kv_b) override;
  void keep_latents(const LatentSpec& spec, const at::Tensor& latent_Sl, const at::Tensor& rotary_key_Sr) override;
  void select_keys(const IndexerSpec& spec, const at::Tensor& query_Shd, const at::Tensor& key_Sd,
                   const at::Tensor& weight_Sh) override;
  at::Tensor selected_keys(int64_t begin, int64_t count) const override;
  void keep_index_keys(const IndexerSpec& spec, const at::Tensor& key_Sd) override;
  at::Tensor causal_convolution(int64_t slot, const at::Tensor& x_SC, const Parameter& weight_C1K,
                                const Parameter* bias_C) override;
  at::Tensor gated_delta_rule(int64_t slot, const at::Tensor& query_SGk, const at::Tensor& key_SGk, const at::Tensor& value_SHv,
                              const at::Tensor& log_decay_SH, const at::Tensor& beta_SH) override;
  at::Tensor state_space(int64_t slot, const at::Tensor& x_SHp, const at::Tensor& dt_SH, const at::Tensor& a_H,
                         const at::Tensor& b_SGn, const at::Tensor& c_SGn) override;
  at::Tensor choose_experts(int64_t router, const at::Tensor& scores_SE, int64_t k) override;
  at::Tensor experts(const at::Tensor& x_SD, const at::Tensor& chosen_Sk, const at::Tensor& weights_Sk,
                     const ExpertWeights& experts) override;

 private:
  Execution& execution_;
};

}  // namespace longstraw::core::model
