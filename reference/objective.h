#pragma once
// The textbook batch formula of GRPO and its relatives (in the dialect of TRL), as tensor operations with autograd.
// B responses, m the completion mask, T_i = Σ_t m_it, lp/lo/lr current, old and reference log-probs, A advantage:
//
//   r_it = exp(lp_it - lo_it),  lo = stop(lp) when absent;  capped at delta when one is set
//   l_it = -min(r_it A_i, clip(r_it, 1 - ε, 1 + ε_high) A_i) + β kl_it
//   kl   = lp - lr (k1);  ½ (lp - lr)² (k2);  e^(lr - lp) - (lr - lp) - 1 (k3)
//   L    = 1/B Σ_i (Σ_t l_it m_it / T_i) (grpo);  Σ l m / Σ m (dapo, bnpo);  Σ l m / (B · max_completion_length) (dr_grpo)
//
// Sums are over the whole optimizer step, so L is a sum of one term a response. Written independently of LongStraw's
// streaming objective, which it is compared with.

#include "core/data/rollouts.h"
#include "core/objective/config.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace longstraw::reference {

// [prompt][member]. A given advantage is used as it is; else (reward - mean of the group) / (s + advantage_epsilon), s
// the unbiased standard deviation of the group or of the batch, or no division for `none`. Equal rewards in a group and
// a missing reward give exactly 0; a missing reward takes no part in means and deviations.
std::vector<std::vector<double>> advantages(const core::data::Batch& batch, const core::objective::ObjectiveConfig& config);

class BatchObjective {
 public:
  // Throws ConfigError for β > 0 with a response that has no ref_logprobs. Keeps a reference to `batch`.
  BatchObjective(const core::data::Batch& batch, const core::objective::ObjectiveConfig& config, int64_t max_completion_length);

  // One response's share of L, split; L = Σ (policy + kl). Scalars in the dtype of the log-probs.
  struct Share {
    at::Tensor policy;
    at::Tensor kl;  // with β; undefined when β is 0
  };
  Share share(size_t prompt, size_t member, const at::Tensor& logprobs_R) const;

  const std::vector<std::vector<double>>& advantages() const { return advantages_; }

 private:
  double denominator(double own_tokens) const;
  const core::data::Batch& batch_;
  core::objective::ObjectiveConfig config_;
  double max_completion_length_;
  std::vector<std::vector<double>> advantages_;
  double responses_ = 0;  // B
  double tokens_ = 0;     // Σ_i T_i
};

}  // namespace longstraw::reference
