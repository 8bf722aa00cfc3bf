#pragma once
// A trace of a forward pass: one number a row and operation, by which two runs of the same decoder show where they part
// (docs/record.md). It looks on: operations are carried out by the execution that it is given, with the same arguments, so
// a traced run has the bits of an untraced one.
//
// The number of what is computed is its projection on a fixed direction, Σ_i r_i x_i in float64 over the row's elements, with
// r_i = ⌊splitmix64(i) / 2^11⌋ / 2^52 - 1, between -1 and 1 (and not just ±1, which would be blind to routing weights that
// sum to 1). The number of a choice (selected keys, chosen experts) is a hash
// of it as a set, Σ splitmix64(n · 0x9e3779b97f4a7c15) modulo 2^53 over the numbers n: equal sets, whatever their order, have
// equal ones. Routing weights are taken in the order
// of their experts' numbers; of a block's contribution to the residual stream, the contribution itself is traced, which is
// not hidden by what was there before.

#include "core/model/delegating_execution.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace longstraw::core::model {

// By point, "NNNN.operation" in order of computation: one number a traced row.
using Trace = std::map<std::string, std::vector<double>>;

// The numbers as they come, [rows] float64 on the device of the computation.
struct TracePoints {
  std::vector<std::pair<std::string, at::Tensor>> points;
  // The same on the CPU, of rows [begin, begin + count).
  Trace trace(int64_t begin, int64_t count) const;
};

class TracedExecution final : public DelegatingExecution {
 public:
  // Traces rows [begin, begin + count) of the tokens run together into `points`, which must outlive it.
  TracedExecution(Execution& execution, TracePoints& points, int64_t begin, int64_t count)
      : DelegatingExecution(execution), points_(points), begin_(begin), count_(count) {}
  // From now on operations get these rows alone.
  void rows_are_narrowed() { begin_ = 0; }

  at::Tensor embedding(const at::Tensor& ids_S, const Parameter& weight_VD) override;
  at::Tensor linear(const at::Tensor& x, const Parameter& weight_OI, const Parameter* bias_O) override;
  at::Tensor rms_norm(const at::Tensor& x, const Parameter& weight, double eps, bool zero_centred) override;
  at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) override;
  at::Tensor rotate(const at::Tensor& x_Shd, const RotaryTable& table) override;
  at::Tensor add(const at::Tensor& hidden, const at::Tensor& update) override;
  at::Tensor attention(const AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                       const at::Tensor& value_SGd) override;
  at::Tensor latent_attention(const LatentSpec& spec, const at::Tensor& query_plain_SHn, const at::Tensor& query_rotary_SHr,
                              const at::Tensor& latent_Sl, const at::Tensor& rotary_key_Sr, const Parameter& kv_b) override;
  void select_keys(const IndexerSpec& spec, const at::Tensor& query_Shd, const at::Tensor& key_Sd,
                   const at::Tensor& weight_Sh) override;
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
  at::Tensor rows_of(const at::Tensor& x) const;
  // Traces `x` as the output of `operation`, and returns it.
  const at::Tensor& seen(const char* operation, const at::Tensor& x);
  void seen_choice(const char* operation, const at::Tensor& chosen_nk);
  void keep(const char* operation, at::Tensor numbers_n);
  const at::Tensor& direction(int64_t width, c10::Device device);

  TracePoints& points_;
  int64_t begin_, count_;
  std::map<int64_t, at::Tensor> directions_;  // by width
};

}  // namespace longstraw::core::model
