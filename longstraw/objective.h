#pragma once
// The loss, one token at a time. All that depends on the batch (advantages, denominators, sequence ratios, masks) is known
// before any response runs, so each token's loss is a function of that token's log-prob and entropy alone:
//
//   L = Σ_i w_i Σ_t m_it c_it ( policy(lp_it) + β kl_it − entropy_coef · H_it )
//
// w_i from the aggregation, m the completion mask, c the sampler's correction. docs/objectives.md has the formulas of every
// loss_type. What couples the tokens of a response (gspo, gmpo and importance_sampling_level: sequence with old log-probs) or
// of the step (top_entropy_quantile) needs a scoring pass at the weights of the step first: needs_scores(). Its derivatives
// are then constants of the response. The reference has its own batch formula; the two share no code.

#include "core/data/rollouts.h"
#include "core/model/step_gradient.h"
#include "core/objective/config.h"

#include <cstdint>
#include <vector>

namespace longstraw {

// A token's share of the loss, already weighted, and its derivatives.
struct TokenLoss {
  double policy = 0.0;
  double kl = 0.0;                  // β · kl
  double entropy = 0.0;             // − entropy_coef · H
  double derivative = 0.0;          // by the token's log-prob
  double entropy_derivative = 0.0;  // by its entropy
};

class TokenObjective {
 public:
  virtual ~TokenObjective() = default;
  // `entropy` is 0 where wants_entropy() is false.
  virtual TokenLoss token(int64_t prompt, int64_t member, int64_t index, double logprob, double entropy) const = 0;
  // False if every token's derivatives are 0 whatever its log-prob: such a response needs no backward pass.
  virtual bool has_gradient(int64_t prompt, int64_t member) const = 0;
  // Log-probs are of logits divided by this.
  virtual double temperature() const { return 1.0; }
  // Whether entropies are to be computed (they cost a pass over the logits).
  virtual bool wants_entropy() const { return false; }
};

// Whether the objective of this batch depends on log-probs (or entropies) of several tokens at once.
bool needs_scores(const core::data::Batch& batch, const core::objective::ObjectiveConfig& config);

class GrpoObjective final : public TokenObjective {
 public:
  // Keeps a reference to `batch`. `scores`: of the batch at the weights of the step; only read where needs_scores(). Throws
  // ConfigError for what can't be computed from it (β > 0 without ref_logprobs, ...).
  GrpoObjective(const core::data::Batch& batch, const core::objective::ObjectiveConfig& config, double temperature,
                int64_t max_completion_length, const core::model::TokenScores& scores = {}, bool wants_entropy = false);

  TokenLoss token(int64_t prompt, int64_t member, int64_t index, double logprob, double entropy) const override;
  bool has_gradient(int64_t prompt, int64_t member) const override;
  double temperature() const override { return temperature_; }
  bool wants_entropy() const override { return wants_entropy_; }
  const std::vector<std::vector<double>>& advantages() const { return advantages_; }

 private:
  const core::data::Batch& batch_;
  core::objective::ObjectiveConfig config_;
  double temperature_;
  bool wants_entropy_;
  std::vector<std::vector<double>> advantages_;  // [prompt][member]
  std::vector<std::vector<double>> weights_;     // [prompt][member], w_i
};

// [prompt][member], from rewards, reward parts and given advantages.
std::vector<std::vector<double>> group_advantages(const core::data::Batch& batch, const core::objective::ObjectiveConfig& config);

}  // namespace longstraw
