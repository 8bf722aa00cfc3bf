#pragma once
// The textbook batch formula of GRPO and its relatives, as tensor operations with autograd.
// B responses, m the completion mask, T_i = Σ_t m_it, lp/lo/ls/lr current, old, sampler's and reference log-probs, A advantage:
//
//   r_it = exp(lp_it - lo_it),  lo = stop(lp) when absent
//   sequence ratio (gspo, importance_sampling_level: sequence):  r_i = exp(1/T_i Σ_t (lp_it - lo_it) m_it)  at every token
//
//   grpo, dr_grpo, dapo, bnpo, gspo   l = -min(min(r, delta) A, clip(r, 1 - ε, 1 + ε_high) A)
//     clip_ratio_c, for A < 0         l = min(l, -c A)
//   rloo        the same with r_i = exp(Σ_t (lp_it - lo_it) m_it)
//   cispo       l = -stop(min(r, ε_high)) A lp;  in verl's dialect -stop(clip(r, 1 - ε, 1 + ε_high)) A lp
//   sapo        l = -σ(τ (r - 1)) (4/τ) A,  τ = sapo_temperature_pos if A > 0, else sapo_temperature_neg
//   gmpo        l = -A exp(1/T_i Σ_t x_it m_it),  x = min(lp - lo, ε_high) if A > 0, max(lp - lo, -ε) if A < 0
//   reinforce   l = -A lp
//   kl          lp - lr (k1);  ½ (lp - lr)² (k2);  e^(lr - lp) - (lr - lp) - 1 (k3; verl clamps lr - lp to ±20 and this to ±10)
//     use_bias_correction_kl       times r, or the sequence ratio; of k3 in TRL's dialect unless that says otherwise
//   c           1, or exp(lo - ls) of the token or exp(Σ_t (lo - ls) m) of the response, with bounds; gmpo: the geometric mean of c
//   s           1 if the token's entropy H is at or above the (1 - top_entropy_quantile) quantile of the step's tokens
//
//   L = Σ_i w_i Σ_t m_it (c_it s_it l_it + β kl_it) - entropy_coef · mean H
//   w_i = 1 / (B T_i)    seq-mean-token-mean; grpo, gspo, sapo, gmpo, rloo
//         1 / Σ_j T_j    token-mean; dapo, bnpo, cispo
//         1 / B          seq-mean-token-sum; reinforce
//         1 / (B · max_completion_length)   seq-mean-token-sum-norm; dr_grpo
//   mean H: over the tokens with m s; in verl's dialect Σ_i w_i Σ_t m_it s_it H_it
//
// In verl's dialect gspo's gradient goes through each token's own log-prob: r_it = stop(r_i) exp(lp_it - stop(lp_it)). Sums are
// over the whole optimizer step, so L is a sum of one term a response. Written independently of LongStraw's streaming
// objective, which it is compared with.

#include "core/data/rollouts.h"
#include "core/model/step_gradient.h"
#include "core/objective/config.h"
#include "reference/advantages.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace longstraw::reference {

// Whether a response's share of L depends on what other responses score at the weights of the step.
bool needs_scores_first(const core::data::Batch& batch, const core::objective::ObjectiveConfig& config);

class BatchObjective {
 public:
  // Throws ConfigError for what can't be computed from the batch: β > 0 with a response that has no ref_logprobs, ...
  // Keeps a reference to `batch`. `scores`: of the batch, where needs_scores_first().
  BatchObjective(const core::data::Batch& batch, const core::objective::ObjectiveConfig& config, int64_t max_completion_length,
                 const core::model::TokenScores& scores = {});

  // One response's share of L, split; L = Σ (policy + kl + entropy). Scalars in the dtype of the log-probs.
  struct Share {
    at::Tensor policy;
    at::Tensor kl;       // with β in the loss; else undefined
    at::Tensor entropy;  // with entropy_coef; else undefined
  };
  // entropies [R]: read if wants_entropy().
  Share share(size_t prompt, size_t member, const at::Tensor& logprobs_R, const at::Tensor& entropies_R = {}) const;
  bool wants_entropy() const { return config_.entropy_coef > 0; }
  // False where the response's share is 0 whatever the weights: advantage 0, and neither a KL nor an entropy term.
  bool has_gradient(size_t prompt, size_t member) const;

  const std::vector<std::vector<double>>& advantages() const { return advantages_; }

 private:
  void find_selected_tokens(const core::model::TokenScores& scores);
  double denominator(double own_tokens) const;

  const core::data::Batch& batch_;
  core::objective::ObjectiveConfig config_;
  double max_completion_length_;
  std::vector<std::vector<double>> advantages_;
  std::vector<std::vector<std::vector<double>>> selected_;  // [prompt][member][token] m s, as 1 and 0
  double responses_ = 0;                                    // B
  double tokens_ = 0;                                       // Σ_i T_i
  double selected_tokens_ = 0;                              // Σ m s
};

}  // namespace longstraw::reference
