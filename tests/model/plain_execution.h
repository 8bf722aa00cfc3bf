#pragma once
// Carries out what blocks ask of an Execution, for one sequence without a past, by the plainest code there is, and remembers
// what was asked. Operations that a test has no use for fail.

#include "core/model/builder.h"
#include "core/model/execution.h"

#include <ATen/ATen.h>

#include <stdexcept>
#include <vector>

namespace longstraw::core::model {

class PlainExecution final : public Execution {
 public:
  at::Tensor choice_scores;       // of the latest choose_experts
  at::Tensor log_decay, beta;     // of the latest gated_delta_rule
  at::Tensor query, key, value_;  // likewise
  int convolutions = 0, rules = 0;
  std::vector<std::string> projections;  // weights of linear, in order

  at::Tensor linear(const at::Tensor& x, const Parameter& weight_OI, const Parameter* bias_O) override {
    projections.push_back(weight_OI.name);
    return Execution::linear(x, weight_OI, bias_O);
  }

  at::Tensor choose_experts(int64_t, const at::Tensor& scores_SE, int64_t k) override {
    choice_scores = scores_SE;
    return at::argsort(scores_SE, /*stable=*/true, -1, /*descending=*/true).narrow(-1, 0, k);
  }

  at::Tensor experts(const at::Tensor& x_SD, const at::Tensor& chosen_Sk, const at::Tensor& weights_Sk,
                     const ExpertWeights& experts) override {
    std::vector<at::Tensor> rows;
    for (int64_t t = 0; t < x_SD.size(0); ++t) {
      at::Tensor sum = at::zeros({experts.down[0].of(experts.down[0].parameter->value).size(0)}, x_SD.options());
      for (int64_t j = 0; j < chosen_Sk.size(1); ++j) {
        const auto e = size_t(chosen_Sk[t][j].item<int64_t>());
        const auto weight = [&](const std::vector<ExpertWeight>& of) { return of[e].of(of[e].parameter->value); };
        at::Tensor inner = at::mv(weight(experts.up), x_SD[t]);
        if (!experts.gate.empty()) inner = at::silu(at::mv(weight(experts.gate), x_SD[t])) * inner;
        else inner = experts.activation == Activation::kRelu2 ? at::relu(inner).square() : at::silu(inner);
        sum = sum + weights_Sk[t][j] * at::mv(weight(experts.down), inner);
      }
      rows.push_back(sum);
    }
    return at::stack(rows);
  }

  at::Tensor causal_convolution(int64_t, const at::Tensor& x_SC, const Parameter& weight_C1K, const Parameter* bias_C) override {
    ++convolutions;
    const int64_t kernel = weight_C1K.shape[2], tokens = x_SC.size(0);
    const at::Tensor padded = at::cat({at::zeros({kernel - 1, x_SC.size(1)}, x_SC.options()), x_SC});
    at::Tensor sum = bias_C != nullptr ? bias_C->value : at::zeros({x_SC.size(1)}, x_SC.options());
    for (int64_t j = 0; j < kernel; ++j) sum = sum + weight_C1K.value.select(2, j).squeeze(1) * padded.narrow(0, j, tokens);
    return at::silu(sum);
  }

  at::Tensor gated_delta_rule(int64_t, const at::Tensor& query_SGk, const at::Tensor& key_SGk, const at::Tensor& value_SHv,
                              const at::Tensor& log_decay_SH, const at::Tensor& beta_SH) override {
    ++rules;
    query = query_SGk, key = key_SGk, value_ = value_SHv, log_decay = log_decay_SH, beta = beta_SH;
    const int64_t heads = value_SHv.size(1), shared = heads / key_SGk.size(1);
    const auto wide = log_decay_SH.scalar_type();
    const auto unit = [&](const at::Tensor& x) {
      const at::Tensor x_SHk = x.to(wide).repeat_interleave(shared, 1);
      return x_SHk * at::rsqrt(x_SHk.square().sum(-1, true) + 1e-6);
    };
    const at::Tensor q = unit(query_SGk) / std::sqrt(double(key_SGk.size(2))), k = unit(key_SGk), v = value_SHv.to(wide);
    at::Tensor state = at::zeros({heads, key_SGk.size(2), value_SHv.size(2)}, v.options());
    std::vector<at::Tensor> rows;
    for (int64_t t = 0; t < v.size(0); ++t) {
      state = state * log_decay_SH[t].exp().view({-1, 1, 1});
      const at::Tensor read = at::einsum("hkv,hk->hv", {state, k[t]});
      state = state + at::einsum("hk,hv->hkv", {k[t], beta_SH[t].unsqueeze(-1) * (v[t] - read)});
      rows.push_back(at::einsum("hkv,hk->hv", {state, q[t]}));
    }
    return at::stack(rows).to(value_SHv.scalar_type());
  }

  at::Tensor attention(const AttentionSpec&, const at::Tensor&, const at::Tensor&, const at::Tensor&) override { fail(); }
  void keep_keys_values(const AttentionSpec&, const at::Tensor&, const at::Tensor&) override { fail(); }
  at::Tensor latent_attention(const LatentSpec&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const Parameter&) override {
    fail();
  }
  void keep_latents(const LatentSpec&, const at::Tensor&, const at::Tensor&) override { fail(); }
  void select_keys(const IndexerSpec&, const at::Tensor&, const at::Tensor&, const at::Tensor&) override { fail(); }
  void keep_index_keys(const IndexerSpec&, const at::Tensor&) override { fail(); }
  at::Tensor state_space(int64_t, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const at::Tensor&) override {
    fail();
  }

 private:
  [[noreturn]] static void fail() { throw std::logic_error("not an operation of this block"); }
};

// Random values for everything that `builder` declares: about 1 / sqrt(inputs) for matrices, about 1 for vectors.
inline void fill(Builder& builder, at::ScalarType dtype, uint64_t seed) {
  at::manual_seed(seed);
  for (const auto& parameter : builder.parameters) {
    const double spread = parameter->shape.size() > 1 ? 1.0 / std::sqrt(double(parameter->shape.back())) : 1.0;
    parameter->value = (at::randn(parameter->shape, at::kDouble) * spread).to(dtype).set_requires_grad(parameter->trained);
  }
}

inline Parameter& parameter_of(Builder& builder, const std::string& name) {
  for (const auto& parameter : builder.parameters) {
    if (parameter->name == name) return *parameter;
  }
  throw std::logic_error("no parameter " + name);
}

}  // namespace longstraw::core::model
