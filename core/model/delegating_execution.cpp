#include "core/model/delegating_execution.h"

#include <ATen/core/Tensor.h>

namespace longstraw::core::model {

at::Tensor DelegatingExecution::value(const Parameter& parameter) { return execution_.value(parameter); }

at::Tensor DelegatingExecution::embedding(const at::Tensor& ids_S, const Parameter& weight_VD) {
  return execution_.embedding(ids_S, weight_VD);
}

at::Tensor DelegatingExecution::linear(const at::Tensor& x, const Parameter& weight_OI, const Parameter* bias_O) {
  return execution_.linear(x, weight_OI, bias_O);
}

at::Tensor DelegatingExecution::rms_norm(const at::Tensor& x, const Parameter& weight, double eps, bool zero_centred) {
  return execution_.rms_norm(x, weight, eps, zero_centred);
}

at::Tensor DelegatingExecution::swiglu(const at::Tensor& gate, const at::Tensor& up) { return execution_.swiglu(gate, up); }

at::Tensor DelegatingExecution::rotate(const at::Tensor& x_Shd, const RotaryTable& table) {
  return execution_.rotate(x_Shd, table);
}

at::Tensor DelegatingExecution::add(const at::Tensor& hidden, const at::Tensor& update) { return execution_.add(hidden, update); }

at::Tensor DelegatingExecution::attention(const AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                                          const at::Tensor& value_SGd) {
  return execution_.attention(spec, query_SHd, key_SGd, value_SGd);
}

void DelegatingExecution::keep_keys_values(const AttentionSpec& spec, const at::Tensor& key_SGd, const at::Tensor& value_SGd) {
  execution_.keep_keys_values(spec, key_SGd, value_SGd);
}

at::Tensor DelegatingExecution::latent_attention(const LatentSpec& spec, const at::Tensor& query_plain_SHn,
                                                 const at::Tensor& query_rotary_SHr, const at::Tensor& latent_Sl,
                                                 const at::Tensor& rotary_key_Sr, const Parameter& kv_b) {
  return execution_.latent_attention(spec, query_plain_SHn, query_rotary_SHr, latent_Sl, rotary_key_Sr, kv_b);
}

void DelegatingExecution::keep_latents(const LatentSpec& spec, const at::Tensor& latent_Sl, const at::Tensor& rotary_key_Sr) {
  execution_.keep_latents(spec, latent_Sl, rotary_key_Sr);
}

void DelegatingExecution::select_keys(const IndexerSpec& spec, const at::Tensor& query_Shd, const at::Tensor& key_Sd,
                                      const at::Tensor& weight_Sh) {
  execution_.select_keys(spec, query_Shd, key_Sd, weight_Sh);
}

at::Tensor DelegatingExecution::selected_keys(int64_t begin, int64_t count) const { return execution_.selected_keys(begin, count); }

void DelegatingExecution::keep_index_keys(const IndexerSpec& spec, const at::Tensor& key_Sd) {
  execution_.keep_index_keys(spec, key_Sd);
}

at::Tensor DelegatingExecution::causal_convolution(int64_t slot, const at::Tensor& x_SC, const Parameter& weight_C1K,
                                                   const Parameter* bias_C) {
  return execution_.causal_convolution(slot, x_SC, weight_C1K, bias_C);
}

at::Tensor DelegatingExecution::gated_delta_rule(int64_t slot, const at::Tensor& query_SGk, const at::Tensor& key_SGk,
                                                 const at::Tensor& value_SHv, const at::Tensor& log_decay_SH,
                                                 const at::Tensor& beta_SH) {
  return execution_.gated_delta_rule(slot, query_SGk, key_SGk, value_SHv, log_decay_SH, beta_SH);
}

at::Tensor DelegatingExecution::state_space(int64_t slot, const at::Tensor& x_SHp, const at::Tensor& dt_SH, const at::Tensor& a_H,
                                            const at::Tensor& b_SGn, const at::Tensor& c_SGn) {
  return execution_.state_space(slot, x_SHp, dt_SH, a_H, b_SGn, c_SGn);
}

at::Tensor DelegatingExecution::choose_experts(int64_t router, const at::Tensor& scores_SE, int64_t k) {
  return execution_.choose_experts(router, scores_SE, k);
}

at::Tensor DelegatingExecution::experts(const at::Tensor& x_SD, const at::Tensor& chosen_Sk, const at::Tensor& weights_Sk,
                                        const ExpertWeights& experts) {
  return execution_.experts(x_SD, chosen_Sk, weights_Sk, experts);
}

}  // namespace longstraw::core::model
