#pragma once
// The loss, one token at a time. All that depends on the batch (advantages, denominators, sequence ratios, masks) is known
// before any response runs, so each token's loss is a function of that token's log-prob and entropy alone:
//
//   L = Σ_i Σ_t m_it ( w_i e_it c_it policy_it + w_i β kl_it − v_i e_it entropy_coef H_it )
//
// m the completion mask, e the mask of top_entropy_quantile, c the sampler's correction, w_i from the aggregation, v_i = w_i
// (dialect verl) or 1 / Σ m e over the step (trl); kl is multiplied by the ratio under use_bias_correction_kl.
// docs/objectives.md has the formulas of every loss_type. What couples the tokens of a response (gspo, gmpo, rloo and
// importance_sampling_level: sequence, with old log-probs or a KL term that shares the ratio) or of the step
// (top_entropy_quantile; KL in the reward without old log-probs) needs a scoring pass at the weights of the step first:
// needs_scores(). Values and derivatives of such policy losses are then constants of the response, taken from the scores.
// The reference has its own batch formula; the two share no code.

#include "core/data/rollouts.h"
#include "core/model/step_gradient.h"
#include "core/objective/config.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace longstraw {

struct LossTerm;

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

// Refuses, by ConfigError with the keys and the reason, what has no definition or can't be streamed exactly. A batch may still
// lack something: GrpoObjective's constructor says so.
void check_objective(const core::objective::ObjectiveConfig& config);

// Whether the objective of this batch depends on log-probs (or entropies) of several tokens at once.
bool needs_scores(const core::data::Batch& batch, const core::objective::ObjectiveConfig& config);

class GrpoObjective final : public TokenObjective {
 public:
  // Keeps a reference to `batch`. `scores`: of the batch at the weights of the step, with entropies if top_entropy_quantile is
  // below 1; only read where needs_scores(). Throws ConfigError for what can't be computed from it (β > 0 without
  // ref_logprobs, ...).
  GrpoObjective(const core::data::Batch& batch, const core::objective::ObjectiveConfig& config, double temperature,
                int64_t max_completion_length, const core::model::TokenScores& scores = {}, bool wants_entropy = false);

  TokenLoss token(int64_t prompt, int64_t member, int64_t index, double logprob, double entropy) const override;
  bool has_gradient(int64_t prompt, int64_t member) const override { return plans_[prompt][member].has_gradient; }
  double temperature() const override { return temperature_; }
  bool wants_entropy() const override { return wants_entropy_; }
  const std::vector<std::vector<double>>& advantages() const { return advantages_; }

  // What is known of a response before it runs.
  struct ResponsePlan {
    double weight = 0.0;              // w_i
    double entropy_weight = 0.0;      // v_i · entropy_coef
    std::vector<uint8_t> kept;        // by token: m e
    std::vector<double> share;        // by token: m e c
    std::optional<double> log_ratio;  // of the whole response, where its tokens share one
    std::vector<double> values;       // by token: the policy loss, unweighted; of coupled losses only
    std::vector<double> derivatives;  // likewise, by the token's log-prob
    std::optional<double> kl_pull;    // of the response's KL at each counted log-prob, through a shared ratio; unweighted
    bool has_gradient = false;
  };

 private:
  // The token's KL, times the ratio if that is wanted; by its log-prob.
  LossTerm kl_term(const core::data::Response& response, const ResponsePlan& plan, int64_t index, double logprob) const;

  const core::data::Batch& batch_;
  core::objective::ObjectiveConfig config_;
  double temperature_;
  bool wants_entropy_;
  std::vector<std::vector<double>> advantages_;   // [prompt][member]
  std::vector<std::vector<ResponsePlan>> plans_;  // likewise
};

// [prompt][member], from rewards, reward parts and given advantages. `scores`: read only for a KL term in the reward of
// responses without old log-probs.
std::vector<std::vector<double>> group_advantages(const core::data::Batch& batch, const core::objective::ObjectiveConfig& config,
                                                  const core::model::TokenScores& scores = {});

}  // namespace longstraw
