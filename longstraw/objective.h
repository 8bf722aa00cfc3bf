#pragma once
// The loss, one token at a time. All that depends on the batch (advantages, denominators) is known before any response
// runs, so each token's loss and its derivative by the token's log-prob are functions of that log-prob alone:
//
//   L = Σ_i w_i Σ_t m_it ( −min(r_it A_i, clip(r_it, 1−ε, 1+ε_high) A_i) + β kl_it ),   r_it = exp(lp_it − lo_it)
//   w_i = 1/(B T_i) grpo;  1/Σ_j T_j dapo and bnpo;  1/(B·max_completion_length) dr_grpo
//
// B responses and T_i counted tokens of the whole optimizer step (FORMULAS of TRL's GRPOTrainer). The reference has its
// own batch formula; the two share no code.

#include "core/data/rollouts.h"
#include "core/objective/config.h"

#include <cstdint>
#include <vector>

namespace longstraw {

// A token's share of the loss, already weighted, and its derivative by the token's log-prob.
struct TokenLoss {
  double policy = 0.0;
  double kl = 0.0;  // β · kl
  double derivative = 0.0;
};

class TokenObjective {
 public:
  virtual ~TokenObjective() = default;
  virtual TokenLoss token(int64_t prompt, int64_t member, int64_t index, double logprob) const = 0;
  // False if every token's derivative is 0 whatever its log-prob: such a response needs no backward pass.
  virtual bool has_gradient(int64_t prompt, int64_t member) const = 0;
  // Log-probs are of logits divided by this.
  virtual double temperature() const { return 1.0; }
};

class GrpoObjective final : public TokenObjective {
 public:
  // Keeps a reference to `batch`. Throws ConfigError for what can't be computed from it (β > 0 without ref_logprobs).
  GrpoObjective(const core::data::Batch& batch, const core::objective::ObjectiveConfig& config, double temperature,
                int64_t max_completion_length);

  TokenLoss token(int64_t prompt, int64_t member, int64_t index, double logprob) const override;
  bool has_gradient(int64_t prompt, int64_t member) const override;
  double temperature() const override { return temperature_; }
  const std::vector<std::vector<double>>& advantages() const { return advantages_; }

 private:
  const core::data::Batch& batch_;
  core::objective::ObjectiveConfig config_;
  double temperature_;
  std::vector<std::vector<double>> advantages_;  // [prompt][member]
  std::vector<std::vector<double>> weights_;     // [prompt][member], w_i
};

}  // namespace longstraw
