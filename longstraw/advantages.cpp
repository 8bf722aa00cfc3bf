#include "longstraw/objective.h"
#include "longstraw/token_loss.h"

#include "core/base/errors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

namespace longstraw {
namespace {

using core::data::Batch;
using core::data::PromptGroup;
using core::data::Response;
using core::model::TokenScores;
using core::objective::AdvantageEstimator;
using core::objective::KlPlace;
using core::objective::ObjectiveConfig;
using core::objective::RewardAggregation;
using core::objective::ScaleRewards;

using Rows = std::vector<std::vector<double>>;
using RewardRows = std::vector<std::vector<std::optional<double>>>;  // [prompt][member]

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

Spread spread_of(const std::vector<std::optional<double>>& values) {
  Spread spread;
  for (const auto& value : values) {
    if (value) spread.add(*value);
  }
  return spread;
}

Spread spread_of(const RewardRows& rows) {
  Spread spread;
  for (const auto& row : rows) {
    for (const auto& value : row) {
      if (value) spread.add(*value);
    }
  }
  return spread;
}

double reward_weight(const ObjectiveConfig& config, size_t part, size_t parts) {
  if (!config.reward_weights) return 1.0;
  if (config.reward_weights->size() != parts) {
    throw ConfigError(fmt::format("objective.reward_weights has {} weights, but the responses have {} rewards",
                                  config.reward_weights->size(), parts));
  }
  return (*config.reward_weights)[part];
}

// The weighted sum of the parts that are there.
std::optional<double> reward_of(const Response& response, const ObjectiveConfig& config) {
  if (response.reward_parts.empty()) return response.reward;
  std::optional<double> sum;
  for (size_t k = 0; k < response.reward_parts.size(); ++k) {
    const double weight = reward_weight(config, k, response.reward_parts.size());
    if (response.reward_parts[k]) sum = sum.value_or(0.0) + weight * *response.reward_parts[k];
  }
  return sum;
}

// Σ m (lo − lr): k1 of the policy that sampled against the reference model.
double summed_kl(const Response& response, const std::vector<double>& old_logprobs) {
  double sum = 0.0;
  for (size_t t = 0; t < old_logprobs.size(); ++t) {
    if (counts(response, static_cast<int64_t>(t))) sum += old_logprobs[t] - (*response.ref_logprobs)[t];
  }
  return sum;
}

// Of responses without a given advantage: those with one take no part in any mean.
RewardRows rewards_of(const Batch& batch, const ObjectiveConfig& config, const TokenScores& scores) {
  const bool with_kl = config.beta > 0.0 && config.kl_in == KlPlace::kReward;
  RewardRows rewards;
  for (size_t p = 0; p < batch.size(); ++p) {
    auto& row = rewards.emplace_back();
    for (size_t m = 0; m < batch[p].responses.size(); ++m) {
      const Response& response = batch[p].responses[m];
      std::optional<double> reward = response.advantage ? std::nullopt : reward_of(response, config);
      if (reward && with_kl) {
        require_reference(batch[p], response, config);
        const auto& old_logprobs = response.old_logprobs ? *response.old_logprobs : scored_logprobs(batch, scores, p, m);
        *reward -= config.beta * summed_kl(response, old_logprobs);
      }
      row.push_back(reward);
    }
  }
  return rewards;
}

Rows zeros_like(const RewardRows& rewards) {
  Rows rows;
  for (const auto& row : rewards) rows.emplace_back(row.size(), 0.0);
  return rows;
}

Rows grpo_advantages(const RewardRows& rewards, const ObjectiveConfig& config) {
  Rows advantages = zeros_like(rewards);
  const double batch_deviation = spread_of(rewards).deviation();
  for (size_t p = 0; p < rewards.size(); ++p) {
    const Spread spread = spread_of(rewards[p]);
    // Equal rewards say nothing; their rounded mean must not be blown up by a tiny deviation.
    if (spread.all_equal()) continue;
    double divisor = 1.0;
    if (config.scale_rewards == ScaleRewards::kGroup) divisor = spread.deviation() + config.advantage_epsilon;
    if (config.scale_rewards == ScaleRewards::kBatch) divisor = batch_deviation + config.advantage_epsilon;
    for (size_t m = 0; m < rewards[p].size(); ++m) {
      if (rewards[p][m]) advantages[p][m] = (*rewards[p][m] - spread.mean) / divisor;
    }
  }
  return advantages;
}

// r − mean of the others = n/(n−1) (r − mean).
Rows rloo_advantages(const RewardRows& rewards) {
  Rows advantages = zeros_like(rewards);
  for (size_t p = 0; p < rewards.size(); ++p) {
    const Spread spread = spread_of(rewards[p]);
    if (spread.all_equal()) continue;
    const auto n = static_cast<double>(spread.count);
    for (size_t m = 0; m < rewards[p].size(); ++m) {
      if (rewards[p][m]) advantages[p][m] = n / (n - 1.0) * (*rewards[p][m] - spread.mean);
    }
  }
  return advantages;
}

// verl's masked_whiten over the counted tokens of the batch, of values that all tokens of a response share.
void whiten(Rows& values, const RewardRows& rewards, const Batch& batch) {
  constexpr double kEpsilon = 1e-8;
  const auto each = [&](const std::function<void(double& value, double tokens)>& visit) {
    for (size_t p = 0; p < values.size(); ++p) {
      for (size_t m = 0; m < values[p].size(); ++m) {
        if (rewards[p][m]) visit(values[p][m], static_cast<double>(counted_tokens(batch[p].responses[m])));
      }
    }
  };
  double tokens = 0.0, mean = 0.0, variance = 0.0;
  each([&](double value, double n) { tokens += n, mean += n * value; });
  if (tokens < 2.0) return each([](double& value, double) { value = 0.0; });
  mean /= tokens;
  each([&](double value, double n) { variance += n * (value - mean) * (value - mean); });
  variance /= tokens - 1.0;
  each([&](double& value, double) { value = (value - mean) / std::sqrt(variance + kEpsilon); });
}

Rows reinforce_plus_plus_advantages(const RewardRows& rewards, const Batch& batch) {
  Rows advantages = zeros_like(rewards);
  for (size_t p = 0; p < rewards.size(); ++p) {
    const Spread spread = spread_of(rewards[p]);
    if (spread.all_equal()) continue;
    for (size_t m = 0; m < rewards[p].size(); ++m) {
      if (rewards[p][m]) advantages[p][m] = *rewards[p][m] - spread.mean;
    }
  }
  whiten(advantages, rewards, batch);
  return advantages;
}

// Part k of every response; a response without parts has its reward as the only one.
RewardRows part_rows(const Batch& batch, size_t k) {
  RewardRows rows;
  for (const auto& group : batch) {
    auto& row = rows.emplace_back();
    for (const auto& response : group.responses) {
      const auto part = response.reward_parts.empty() ? response.reward : response.reward_parts[k];
      row.push_back(response.advantage ? std::nullopt : part);
    }
  }
  return rows;
}

size_t count_parts(const Batch& batch) {
  std::set<size_t> sizes;
  for (const auto& group : batch) {
    for (const auto& response : group.responses) sizes.insert(std::max<size_t>(1, response.reward_parts.size()));
  }
  if (sizes.size() > 1) {
    throw ConfigError(fmt::format(
        "objective.multi_objective_aggregation is normalize_then_sum, but responses have {} rewards and others {}: wanted the "
        "same number",
        *sizes.begin(), *sizes.rbegin()));
  }
  return sizes.empty() ? 1 : *sizes.begin();
}

// GDPO: each part a z-score within its group, their weighted sum a z-score over the batch.
Rows gdpo_advantages(const Batch& batch, const ObjectiveConfig& config) {
  RewardRows sums;
  for (const auto& group : batch) sums.emplace_back(group.responses.size());
  std::vector<uint8_t> silent(batch.size(), 1);
  const size_t parts = count_parts(batch);
  for (size_t k = 0; k < parts; ++k) {
    const double weight = reward_weight(config, k, parts);
    const RewardRows rows = part_rows(batch, k);
    for (size_t p = 0; p < rows.size(); ++p) {
      const Spread spread = spread_of(rows[p]);
      if (!spread.all_equal()) silent[p] = 0;
      for (size_t m = 0; m < rows[p].size(); ++m) {
        if (!rows[p][m]) continue;
        const double score =
            spread.all_equal() ? 0.0 : (*rows[p][m] - spread.mean) / (spread.deviation() + config.advantage_epsilon);
        sums[p][m] = sums[p][m].value_or(0.0) + weight * score;
      }
    }
  }
  const Spread whole = spread_of(sums);
  Rows advantages = zeros_like(sums);
  for (size_t p = 0; p < sums.size(); ++p) {
    // The scores of every group add up to 0, so the batch's mean is a rounding and a silent group's advantage is 0.
    if (silent[p] != 0 || whole.all_equal()) continue;
    for (size_t m = 0; m < sums[p].size(); ++m) {
      if (sums[p][m]) advantages[p][m] = (*sums[p][m] - whole.mean) / (whole.deviation() + config.advantage_epsilon);
    }
  }
  return advantages;
}

Rows from_rewards(const Batch& batch, const ObjectiveConfig& config, const TokenScores& scores) {
  if (config.multi_objective_aggregation == RewardAggregation::kNormalizeThenSum) return gdpo_advantages(batch, config);
  const RewardRows rewards = rewards_of(batch, config, scores);
  switch (config.advantage_estimator) {
    case AdvantageEstimator::kGrpo: return grpo_advantages(rewards, config);
    case AdvantageEstimator::kRloo: return rloo_advantages(rewards);
    case AdvantageEstimator::kReinforcePlusPlusBaseline: return reinforce_plus_plus_advantages(rewards, batch);
  }
  return {};
}

}  // namespace

Rows group_advantages(const Batch& batch, const ObjectiveConfig& config, const TokenScores& scores) {
  Rows advantages = from_rewards(batch, config, scores);
  for (size_t p = 0; p < batch.size(); ++p) {
    for (size_t m = 0; m < batch[p].responses.size(); ++m) {
      if (batch[p].responses[m].advantage) advantages[p][m] = *batch[p].responses[m].advantage;
    }
  }
  return advantages;
}

}  // namespace longstraw
