#include "longstraw/objective.h"

#include "core/base/errors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace longstraw {
namespace {

using core::data::Batch;
using core::data::Response;
using core::objective::Kl;
using core::objective::LossType;
using core::objective::ObjectiveConfig;
using core::objective::ScaleRewards;

// Running mean and sum of squared deviations (Welford), so that nothing is kept.
struct Spread {
  int64_t count = 0;
  double mean = 0.0, squares = 0.0, low = INFINITY, high = -INFINITY;

  void add(double x) {
    ++count;
    const double off = x - mean;
    mean += off / static_cast<double>(count);
    squares += off * (x - mean);
    low = std::min(low, x);
    high = std::max(high, x);
  }
  bool all_equal() const { return !(low < high); }
  double deviation() const { return count > 1 ? std::sqrt(squares / static_cast<double>(count - 1)) : 0.0; }
};

std::vector<std::vector<double>> compute_advantages(const Batch& batch, const ObjectiveConfig& config) {
  Spread whole;
  for (const auto& group : batch) {
    for (const auto& response : group.responses) {
      if (response.reward) whole.add(*response.reward);
    }
  }
  std::vector<std::vector<double>> advantages;
  for (const auto& group : batch) {
    Spread spread;
    for (const auto& response : group.responses) {
      if (response.reward) spread.add(*response.reward);
    }
    double divisor = 1.0;
    if (config.scale_rewards == ScaleRewards::kGroup) divisor = spread.deviation() + config.advantage_epsilon;
    if (config.scale_rewards == ScaleRewards::kBatch) divisor = whole.deviation() + config.advantage_epsilon;
    auto& row = advantages.emplace_back();
    for (const auto& response : group.responses) {
      // Equal rewards say nothing; their rounded mean must not be blown up by a tiny deviation.
      const bool silent = !response.reward || spread.all_equal();
      row.push_back(response.advantage ? *response.advantage : silent ? 0.0 : (*response.reward - spread.mean) / divisor);
    }
  }
  return advantages;
}

bool counts(const Response& response, int64_t index) {
  return !response.completion_mask || (*response.completion_mask)[index] != 0;
}

int64_t counted_tokens(const Response& response) {
  const auto length = static_cast<int64_t>(response.completion_ids.size());
  if (!response.completion_mask) return length;
  return std::count_if(response.completion_mask->begin(), response.completion_mask->end(), [](auto m) { return m != 0; });
}

struct KlTerm {
  double value, derivative;
};

KlTerm kl_term(Kl kind, double logprob, double reference) {
  const double ratio = std::exp(reference - logprob);
  switch (kind) {
    case Kl::kK1: return {logprob - reference, 1.0};
    case Kl::kK2: return {0.5 * (logprob - reference) * (logprob - reference), logprob - reference};
    case Kl::kK3: return {ratio - (reference - logprob) - 1.0, 1.0 - ratio};
  }
  return {0.0, 0.0};
}

}  // namespace

std::vector<std::vector<double>> group_advantages(const Batch& batch, const ObjectiveConfig& config) {
  return compute_advantages(batch, config);
}

bool needs_scores(const Batch&, const ObjectiveConfig&) { return false; }

GrpoObjective::GrpoObjective(const Batch& batch, const ObjectiveConfig& config, double temperature, int64_t max_completion_length,
                             const core::model::TokenScores&, bool wants_entropy)
    : batch_(batch),
      config_(config),
      temperature_(temperature),
      wants_entropy_(wants_entropy),
      advantages_(compute_advantages(batch, config)) {
  double responses = 0.0, tokens = 0.0;
  for (const auto& group : batch) {
    for (const auto& response : group.responses) {
      responses += 1.0;
      tokens += static_cast<double>(counted_tokens(response));
      if (config.beta > 0.0 && !response.ref_logprobs) {
        throw ConfigError(
            fmt::format("objective.beta is {}, but prompt {} has a response without ref_logprobs", config.beta, group.prompt_id));
      }
    }
  }
  for (const auto& group : batch) {
    auto& row = weights_.emplace_back();
    for (const auto& response : group.responses) {
      const double own = std::max<double>(1.0, static_cast<double>(counted_tokens(response)));
      switch (config.loss_type) {
        case LossType::kGrpo: row.push_back(1.0 / (responses * own)); break;
        case LossType::kDapo:
        case LossType::kBnpo: row.push_back(1.0 / std::max(1.0, tokens)); break;
        case LossType::kDrGrpo: row.push_back(1.0 / (responses * static_cast<double>(max_completion_length))); break;
        default: throw ConfigError("objective.loss_type: not there yet");
      }
    }
  }
}

TokenLoss GrpoObjective::token(int64_t prompt, int64_t member, int64_t index, double logprob, double) const {
  const Response& response = batch_[prompt].responses[member];
  if (!counts(response, index)) return {};
  const double weight = weights_[prompt][member], advantage = advantages_[prompt][member];
  TokenLoss loss;
  // Without old log-probs the ratio is 1 and its derivative by the log-prob still flows.
  const double ratio = response.old_logprobs ? std::exp(logprob - (*response.old_logprobs)[index]) : 1.0;
  const bool capped = config_.delta && ratio > *config_.delta;
  const double plain = (capped ? *config_.delta : ratio) * advantage;
  const double high = 1.0 + config_.epsilon_high.value_or(config_.epsilon), low = 1.0 - config_.epsilon;
  const double clipped = std::clamp(ratio, low, high) * advantage;
  const bool plain_counts = plain <= clipped;
  loss.policy = -weight * (plain_counts ? plain : clipped);
  const bool inside = ratio >= low && ratio <= high;
  if (plain_counts ? !capped : inside) loss.derivative = -weight * ratio * advantage;
  if (config_.beta > 0.0) {
    const KlTerm term = kl_term(config_.kl, logprob, (*response.ref_logprobs)[index]);
    loss.kl = weight * config_.beta * term.value;
    loss.derivative += weight * config_.beta * term.derivative;
  }
  return loss;
}

bool GrpoObjective::has_gradient(int64_t prompt, int64_t member) const {
  if (counted_tokens(batch_[prompt].responses[member]) == 0) return false;
  return advantages_[prompt][member] != 0.0 || config_.beta > 0.0;
}

}  // namespace longstraw
