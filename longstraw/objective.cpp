#include "longstraw/objective.h"

#include "longstraw/response_plan.h"
#include "longstraw/token_loss.h"

#include <cmath>

namespace longstraw {

using core::data::Batch;
using core::data::Response;
using core::objective::Dialect;
using core::objective::Kl;
using core::objective::KlPlace;
using core::objective::LossType;
using core::objective::ObjectiveConfig;

namespace {

const ObjectiveConfig& checked(const ObjectiveConfig& config) {
  check_objective(config);
  return config;
}

// −weight A lp, the weight a constant.
LossTerm logprob_loss(double weight, double advantage, double logprob) {
  return {-weight * advantage * logprob, -weight * advantage};
}

// log r of the token, as its loss has it. Without old log-probs the ratio is 1 and its derivative by the log-prob still flows.
double log_ratio_of(const Response& response, const GrpoObjective::ResponsePlan& plan, int64_t index, double logprob) {
  if (plan.log_ratio) return *plan.log_ratio;
  return response.old_logprobs ? logprob - (*response.old_logprobs)[index] : 0.0;
}

}  // namespace

GrpoObjective::GrpoObjective(const Batch& batch, const ObjectiveConfig& config, double temperature, int64_t max_completion_length,
                             const core::model::TokenScores& scores, bool wants_entropy)
    : batch_(batch),
      config_(checked(config)),
      temperature_(temperature),
      wants_entropy_(wants_entropy || config.entropy_coef > 0.0),
      advantages_(group_advantages(batch, config, scores)),
      plans_(plan_responses({batch, config, max_completion_length, scores, advantages_})) {}

LossTerm GrpoObjective::kl_term(const Response& response, const ResponsePlan& plan, int64_t index, double logprob) const {
  const LossTerm kl = kl_loss(config_, logprob, (*response.ref_logprobs)[index]);
  if (!corrects_kl(config_)) return kl;
  const double ratio = std::exp(log_ratio_of(response, plan, index, logprob));
  const double value = ratio * kl.value;
  // (r kl)' = r kl' + r' kl. A ratio of the token's own has r' = r, also where it is 1; of a shared one all tokens have a part.
  // k3 with its own ratio: the exponentials of both parts cancel, and take most digits with them where lr is far above lp.
  const bool exponentials_cancel = config_.kl == Kl::kK3 && config_.dialect == Dialect::kTrl && !plan.kl_pull;
  if (exponentials_cancel) return {value, ratio * (logprob - (*response.ref_logprobs)[index])};
  return {value, ratio * kl.derivative + plan.kl_pull.value_or(value)};
}

TokenLoss GrpoObjective::token(int64_t prompt, int64_t member, int64_t index, double logprob, double entropy) const {
  const Response& response = batch_[prompt].responses[member];
  const ResponsePlan& plan = plans_[prompt][member];
  if (!counts(response, index)) return {};
  LossTerm policy;
  if (!plan.values.empty()) {
    policy = {plan.values[index], plan.derivatives[index]};
  } else if (plan.share[index] != 0.0) {
    const double advantage = advantages_[prompt][member];
    const double log_ratio = log_ratio_of(response, plan, index, logprob);
    switch (config_.loss_type) {
      case LossType::kCispo: policy = logprob_loss(cispo_weight(config_, log_ratio), advantage, logprob); break;
      case LossType::kReinforce: policy = logprob_loss(1.0, advantage, logprob); break;
      default: policy = ratio_loss(config_, log_ratio, advantage);
    }
    policy.value *= plan.share[index];
    policy.derivative *= plan.share[index];
  }
  TokenLoss loss{.policy = plan.weight * policy.value, .derivative = plan.weight * policy.derivative};
  if (config_.beta > 0.0 && config_.kl_in == KlPlace::kLoss) {
    const LossTerm kl = kl_term(response, plan, index, logprob);
    loss.kl = plan.weight * config_.beta * kl.value;
    loss.derivative += plan.weight * config_.beta * kl.derivative;
  }
  if (plan.kept[index] != 0 && plan.entropy_weight != 0.0) {
    loss.entropy = -plan.entropy_weight * entropy;
    loss.entropy_derivative = -plan.entropy_weight;
  }
  return loss;
}

}  // namespace longstraw
