#pragma once
// The loss of one ratio: pure functions that the streaming objective is made of. Unweighted; docs/objectives.md has the
// formulas.

#include "core/data/rollouts.h"
#include "core/model/step_gradient.h"
#include "core/objective/config.h"

#include <cstdint>
#include <vector>

namespace longstraw {

// A term and its derivative.
struct LossTerm {
  double value = 0.0;
  double derivative = 0.0;
};

// The policy loss of a ratio e^log_ratio, by log_ratio: every loss_type but cispo, gmpo and reinforce.
LossTerm ratio_loss(const core::objective::ObjectiveConfig& config, double log_ratio, double advantage);

// cispo's weight of −A lp, through which no gradient flows.
double cispo_weight(const core::objective::ObjectiveConfig& config, double log_ratio);

// kl of a token, by its log-prob.
LossTerm kl_loss(const core::objective::ObjectiveConfig& config, double logprob, double reference);

// Whether there is a KL term in the loss, and the ratio multiplies it.
bool corrects_kl(const core::objective::ObjectiveConfig& config);

// What the parts of the objective ask of a batch.
bool counts(const core::data::Response& response, int64_t index);
int64_t counted_tokens(const core::data::Response& response);
// Throws ConfigError: beta without ref_logprobs.
void require_reference(const core::data::PromptGroup& group, const core::data::Response& response,
                       const core::objective::ObjectiveConfig& config);
// Of the scoring pass; throws ConfigError if it has none for this response.
const std::vector<double>& scored_logprobs(const core::data::Batch& batch, const core::model::TokenScores& scores, size_t prompt,
                                           size_t member);
const std::vector<double>& scored_entropies(const core::data::Batch& batch, const core::model::TokenScores& scores, size_t prompt,
                                            size_t member);

// Whether the tokens of a response share its policy loss.
bool is_coupled(const core::objective::ObjectiveConfig& config);
// Whether all tokens of a response have one ratio, and each token's term pulls at its own log-prob alone: verl's gspo.
bool pulls_at_own(const core::objective::ObjectiveConfig& config);
// Whether the tokens share its KL term: through the mean of their log-ratios.
bool kl_is_coupled(const core::objective::ObjectiveConfig& config);
// Whether a response has one loss rather than one a token: gmpo and rloo.
bool has_one_loss(core::objective::LossType type);

}  // namespace longstraw
