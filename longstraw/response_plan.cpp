#include "longstraw/response_plan.h"

#include "longstraw/token_loss.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace longstraw {
namespace {

using core::data::Batch;
using core::data::Response;
using core::objective::Aggregation;
using core::objective::Dialect;
using core::objective::LossType;
using core::objective::ObjectiveConfig;
using core::objective::SamplerCorrection;
using Plan = GrpoObjective::ResponsePlan;
using Plans = std::vector<std::vector<Plan>>;

Aggregation aggregation_of(const ObjectiveConfig& config) {
  if (config.aggregation) return *config.aggregation;
  switch (config.loss_type) {
    case LossType::kGrpo:
    case LossType::kGspo:
    case LossType::kSapo:
    case LossType::kGmpo:
    case LossType::kRloo: return Aggregation::kSeqMeanTokenMean;
    case LossType::kDapo:
    case LossType::kBnpo:
    case LossType::kCispo: return Aggregation::kTokenMean;
    case LossType::kDrGrpo: return Aggregation::kSeqMeanTokenSumNorm;
    case LossType::kReinforce: return Aggregation::kSeqMeanTokenSum;
  }
  return Aggregation::kSeqMeanTokenMean;
}

struct StepCounts {
  double responses = 0.0, tokens = 0.0;
};

StepCounts count_step(const Batch& batch) {
  StepCounts counts;
  for (const auto& group : batch) {
    for (const auto& response : group.responses) {
      counts.responses += 1.0;
      counts.tokens += static_cast<double>(counted_tokens(response));
    }
  }
  return counts;
}

double weight_of(Aggregation aggregation, const StepCounts& step, double own_tokens, int64_t max_completion_length) {
  switch (aggregation) {
    case Aggregation::kSeqMeanTokenMean: return 1.0 / (step.responses * std::max(1.0, own_tokens));
    case Aggregation::kTokenMean: return 1.0 / std::max(1.0, step.tokens);
    case Aggregation::kSeqMeanTokenSum: return 1.0 / step.responses;
    case Aggregation::kSeqMeanTokenSumNorm: return 1.0 / (step.responses * static_cast<double>(max_completion_length));
  }
  return 0.0;
}

// torch.quantile's linear interpolation.
double quantile(std::vector<double> values, double q) {
  const double rank = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(std::floor(rank));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(below), values.end());
  const double low = values[below], share = rank - static_cast<double>(below);
  if (share == 0.0) return low;
  const double high = *std::min_element(values.begin() + static_cast<std::ptrdiff_t>(below) + 1, values.end());
  return low + share * (high - low);
}

// Entropy that a counted token must have to keep its loss.
double entropy_threshold(const PlanInputs& in) {
  if (in.config.top_entropy_quantile >= 1.0) return -INFINITY;
  std::vector<double> entropies;
  for (size_t p = 0; p < in.batch.size(); ++p) {
    for (size_t m = 0; m < in.batch[p].responses.size(); ++m) {
      const auto& scored = scored_entropies(in.batch, in.scores, p, m);
      for (size_t t = 0; t < scored.size(); ++t) {
        if (counts(in.batch[p].responses[m], static_cast<int64_t>(t))) entropies.push_back(scored[t]);
      }
    }
  }
  return entropies.empty() ? 0.0 : quantile(std::move(entropies), 1.0 - in.config.top_entropy_quantile);
}

// gmpo's one weight for its one loss, as verl has it.
double geometric_mean_of(const std::vector<double>& correction, const Response& response) {
  double sum = 0.0;
  for (size_t t = 0; t < correction.size(); ++t) {
    if (counts(response, static_cast<int64_t>(t))) sum += std::log(correction[t]);
  }
  return std::exp(sum / std::max<double>(1.0, static_cast<double>(counted_tokens(response))));
}

// exp(lo − ls), truncated or masked; 1 for responses that lack one of the two.
std::vector<double> sampler_correction(const Response& response, const ObjectiveConfig& config) {
  std::vector<double> correction(response.completion_ids.size(), 1.0);
  const SamplerCorrection kind = config.importance_sampling_correction;
  if (kind == SamplerCorrection::kNone || !response.old_logprobs || !response.sampling_logprobs) return correction;
  const bool of_tokens = kind == SamplerCorrection::kTokenTruncate || kind == SamplerCorrection::kTokenMask;
  const bool truncates = kind == SamplerCorrection::kTokenTruncate || kind == SamplerCorrection::kSequenceTruncate;
  const double low = config.importance_sampling_min, cap = config.importance_sampling_cap;
  const auto bounded = [&](double log_weight) {
    const double weight = std::exp(log_weight);
    return truncates ? std::clamp(weight, low, cap) : weight < low || weight > cap ? 0.0 : weight;
  };
  double sum = 0.0;
  for (size_t t = 0; t < correction.size(); ++t) {
    const double difference = (*response.old_logprobs)[t] - (*response.sampling_logprobs)[t];
    if (of_tokens) correction[t] = bounded(difference);
    if (counts(response, static_cast<int64_t>(t))) sum += difference;
  }
  if (of_tokens && !has_one_loss(config.loss_type)) return correction;
  const double whole = of_tokens ? geometric_mean_of(correction, response) : bounded(sum);
  std::fill(correction.begin(), correction.end(), whole);
  return correction;
}

// Σ m (lp − lo) at the weights of the step; 0 without old log-probs.
double summed_log_ratio(const PlanInputs& in, size_t p, size_t m) {
  const Response& response = in.batch[p].responses[m];
  if (!response.old_logprobs) return 0.0;
  const auto& logprobs = scored_logprobs(in.batch, in.scores, p, m);
  double sum = 0.0;
  for (size_t t = 0; t < logprobs.size(); ++t) {
    if (counts(response, static_cast<int64_t>(t))) sum += logprobs[t] - (*response.old_logprobs)[t];
  }
  return sum;
}

// One ratio for all tokens, exp(mean of the log-ratios). TRL: the gradient goes through that mean, so that each token's term
// pulls at all of them; verl's gspo: each token's term pulls at its own log-prob alone. The two differ where shares do.
void share_ratio(const PlanInputs& in, size_t p, size_t m, double tokens, Plan& plan) {
  plan.log_ratio = summed_log_ratio(in, p, m) / tokens;
  if (in.config.loss_type == LossType::kCispo) return;  // nothing flows through its ratio
  const LossTerm term = ratio_loss(in.config, *plan.log_ratio, in.advantages[p][m]);
  const double mean_share = std::accumulate(plan.share.begin(), plan.share.end(), 0.0) / tokens;
  for (size_t t = 0; t < plan.share.size(); ++t) {
    plan.values.push_back(plan.share[t] * term.value);
    plan.derivatives.push_back(pulls_at_own(in.config)                                     ? plan.share[t] * term.derivative
                               : counts(in.batch[p].responses[m], static_cast<int64_t>(t)) ? mean_share * term.derivative
                                                                                           : 0.0);
  }
}

// d/dlp_s of Σ_t m r kl_t through r = exp(mean of the log-ratios): r Σ_t m kl_t / T, the same at each counted token s.
double shared_kl_pull(const PlanInputs& in, size_t p, size_t m, double tokens, double log_ratio) {
  const Response& response = in.batch[p].responses[m];
  const auto& logprobs = scored_logprobs(in.batch, in.scores, p, m);
  double sum = 0.0;
  for (size_t t = 0; t < logprobs.size(); ++t) {
    if (counts(response, static_cast<int64_t>(t))) sum += kl_loss(in.config, logprobs[t], (*response.ref_logprobs)[t]).value;
  }
  return std::exp(log_ratio) * sum / tokens;
}

// −A exp(mean of the log-ratios, each clamped on the side where A would profit)
void geometric_mean(const PlanInputs& in, size_t p, size_t m, double tokens, Plan& plan) {
  const Response& response = in.batch[p].responses[m];
  const double advantage = in.advantages[p][m];
  std::vector<uint8_t> flows = plan.kept;
  double sum = 0.0;
  if (response.old_logprobs) {
    const auto& logprobs = scored_logprobs(in.batch, in.scores, p, m);
    const double low = -in.config.epsilon, high = in.config.epsilon_high.value_or(in.config.epsilon);
    for (size_t t = 0; t < logprobs.size(); ++t) {
      if (plan.kept[t] == 0) continue;
      const double log_ratio = logprobs[t] - (*response.old_logprobs)[t];
      const bool clamped = advantage > 0.0 ? log_ratio > high : log_ratio < low;
      if (clamped) flows[t] = 0;
      sum += clamped ? (advantage > 0.0 ? high : low) : log_ratio;
    }
  }
  const double loss = advantage == 0.0 ? 0.0 : -advantage * std::exp(sum / tokens);
  for (size_t t = 0; t < plan.share.size(); ++t) {
    plan.values.push_back(plan.share[t] * loss);
    plan.derivatives.push_back(flows[t] != 0 ? plan.share[t] * loss : 0.0);
  }
}

// The ratio of the whole response: a product over its tokens. The weight w_i = 1 / (B T) of a token's term is undone.
void product_ratio(const PlanInputs& in, size_t p, size_t m, double tokens, Plan& plan) {
  const LossTerm term = ratio_loss(in.config, summed_log_ratio(in, p, m), in.advantages[p][m]);
  for (const double share : plan.share) {
    plan.values.push_back(share * term.value);
    plan.derivatives.push_back(share * term.derivative * tokens);
  }
}

// Whether some token of the response can have a derivative.
bool may_have_gradient(const PlanInputs& in, const Plan& plan, double advantage) {
  const auto nonzero = [](auto x) { return x != 0; };
  const bool counted = std::any_of(plan.kept.begin(), plan.kept.end(), nonzero);
  if (counted && plan.entropy_weight != 0.0) return true;
  if (!plan.derivatives.empty()) return std::any_of(plan.derivatives.begin(), plan.derivatives.end(), nonzero);
  return advantage != 0.0 && std::any_of(plan.share.begin(), plan.share.end(), nonzero);
}

Plan plan_response(const PlanInputs& in, size_t p, size_t m, const StepCounts& step, double threshold) {
  const Response& response = in.batch[p].responses[m];
  const auto own_tokens = static_cast<double>(counted_tokens(response));
  Plan plan;
  plan.weight = weight_of(aggregation_of(in.config), step, own_tokens, in.max_completion_length);
  plan.share = sampler_correction(response, in.config);
  for (size_t t = 0; t < plan.share.size(); ++t) {
    const bool kept = counts(response, static_cast<int64_t>(t)) &&
                      (threshold == -INFINITY || scored_entropies(in.batch, in.scores, p, m)[t] >= threshold);
    plan.kept.push_back(kept ? 1 : 0);
    if (!kept) plan.share[t] = 0.0;
  }
  const double tokens = std::max(1.0, own_tokens);
  if (in.config.loss_type == LossType::kGmpo) {
    geometric_mean(in, p, m, tokens, plan);
  } else if (in.config.loss_type == LossType::kRloo) {
    product_ratio(in, p, m, tokens, plan);
  } else if (is_coupled(in.config)) {
    share_ratio(in, p, m, tokens, plan);
    if (kl_is_coupled(in.config)) plan.kl_pull = shared_kl_pull(in, p, m, tokens, *plan.log_ratio);
  }
  return plan;
}

}  // namespace

Plans plan_responses(const PlanInputs& in) {
  const StepCounts step = count_step(in.batch);
  const bool kl_in_loss = in.config.beta > 0.0 && in.config.kl_in == core::objective::KlPlace::kLoss;
  const double threshold = entropy_threshold(in);
  Plans plans;
  double kept = 0.0;
  for (size_t p = 0; p < in.batch.size(); ++p) {
    auto& row = plans.emplace_back();
    for (size_t m = 0; m < in.batch[p].responses.size(); ++m) {
      if (kl_in_loss) require_reference(in.batch[p], in.batch[p].responses[m], in.config);
      row.push_back(plan_response(in, p, m, step, threshold));
      kept += static_cast<double>(std::count(row.back().kept.begin(), row.back().kept.end(), 1));
    }
  }
  for (size_t p = 0; p < plans.size(); ++p) {
    for (size_t m = 0; m < plans[p].size(); ++m) {
      Plan& plan = plans[p][m];
      const double mean = in.config.dialect == Dialect::kTrl ? 1.0 / std::max(1.0, kept) : plan.weight;
      plan.entropy_weight = in.config.entropy_coef * mean;
      plan.has_gradient =
          (kl_in_loss && counted_tokens(in.batch[p].responses[m]) > 0) || may_have_gradient(in, plan, in.advantages[p][m]);
    }
  }
  return plans;
}

}  // namespace longstraw
