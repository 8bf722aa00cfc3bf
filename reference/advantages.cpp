#include "reference/advantages.h"

#include "core/base/errors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

namespace longstraw::reference {

using core::data::Batch;
using core::data::PromptGroup;
using core::data::Response;
using core::model::TokenScores;
using core::objective::AdvantageEstimator;
using core::objective::KlPlace;
using core::objective::ObjectiveConfig;
using core::objective::RewardAggregation;
using core::objective::ScaleRewards;

namespace {

using Number = std::optional<double>;
using Grouped = std::vector<std::vector<Number>>;  // [prompt][member]; missing: no part of anything

std::vector<double> present(const std::vector<Number>& values) {
  std::vector<double> found;
  for (const Number& value : values) {
    if (value) found.push_back(*value);
  }
  return found;
}

std::vector<double> present(const Grouped& groups) {
  std::vector<double> found;
  for (const auto& group : groups) {
    for (const double value : present(group)) found.push_back(value);
  }
  return found;
}

double mean(const std::vector<double>& values) {
  return values.empty() ? 0.0 : std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
}

double unbiased_variance(const std::vector<double>& values) {
  if (values.size() < 2) return 0.0;
  const double center = mean(values);
  double squares = 0.0;
  for (const double value : values) squares += (value - center) * (value - center);
  return squares / double(values.size() - 1);
}

double deviation(const std::vector<double>& values) { return std::sqrt(unbiased_variance(values)); }

// Stated, not computed: the rounded mean of equal numbers may differ from them, and dividing what is left by the rounded
// deviation makes an advantage out of nothing.
bool nothing_to_tell(const std::vector<Number>& group) {
  const auto values = present(group);
  return std::adjacent_find(values.begin(), values.end(), std::not_equal_to<>()) == values.end();
}

std::vector<Number> less_its_mean(const std::vector<Number>& group) {
  const double center = nothing_to_tell(group) ? 0.0 : mean(present(group));
  std::vector<Number> centered = group;
  for (Number& value : centered) {
    if (value) *value = nothing_to_tell(group) ? 0.0 : *value - center;
  }
  return centered;
}

double weight_of(const ObjectiveConfig& config, size_t part) {
  return config.reward_weights ? (*config.reward_weights)[part] : 1.0;
}

double kl_of_response(const Response& response, const std::vector<double>* scored, const std::string& where) {
  const std::vector<double>* old = response.old_logprobs ? &*response.old_logprobs : scored;
  if (!response.ref_logprobs)
    throw ConfigError("objective.kl_in: reward needs ref_logprobs of every response; " + where + " has none");
  if (!old) throw ConfigError("objective.kl_in: reward needs old_logprobs or a scoring pass; " + where + " has neither");
  const std::vector<double> mask = token_mask(response);
  double sum = 0.0;
  for (size_t t = 0; t < mask.size(); ++t) {
    if (mask[t] != 0.0) sum += (*old)[t] - (*response.ref_logprobs)[t];
  }
  return sum;
}

void check_parts(const PromptGroup& group, size_t member, const ObjectiveConfig& config) {
  const size_t parts = group.responses[member].reward_parts.size();
  if (parts > 0 && config.reward_weights && config.reward_weights->size() != parts) {
    throw ConfigError(fmt::format("objective.reward_weights: {} weights, but prompt {} response {} has {} reward parts",
                                  config.reward_weights->size(), group.prompt_id, member, parts));
  }
}

// The rewards that statistics are made of: not those beside a given advantage.
Grouped rewards_of(const Batch& batch, const ObjectiveConfig& config, const TokenScores& scores) {
  Grouped rewards;
  for (size_t prompt = 0; prompt < batch.size(); ++prompt) {
    auto& row = rewards.emplace_back();
    for (size_t member = 0; member < batch[prompt].responses.size(); ++member) {
      const Response& response = batch[prompt].responses[member];
      check_parts(batch[prompt], member, config);
      Number& reward = row.emplace_back();
      if (response.advantage) continue;
      reward = response.reward;
      if (!present(response.reward_parts).empty()) {
        reward = 0.0;
        for (size_t k = 0; k < response.reward_parts.size(); ++k)
          *reward += weight_of(config, k) * response.reward_parts[k].value_or(0);
      }
      if (reward && config.kl_in == KlPlace::kReward && config.beta > 0) {
        const auto* scored = scores.logprobs.empty() ? nullptr : &scores.logprobs.at(prompt).at(member);
        *reward -=
            config.beta * kl_of_response(response, scored, fmt::format("prompt {} response {}", batch[prompt].prompt_id, member));
      }
    }
  }
  return rewards;
}

Grouped relative_to_group(const Grouped& rewards, const ObjectiveConfig& config) {
  Grouped result;
  for (const auto& group : rewards) {
    auto& row = result.emplace_back(less_its_mean(group));
    double scale = 1.0;
    if (config.scale_rewards == ScaleRewards::kGroup) scale = deviation(present(group)) + config.advantage_epsilon;
    if (config.scale_rewards == ScaleRewards::kBatch) scale = deviation(present(rewards)) + config.advantage_epsilon;
    for (Number& value : row) {
      if (value && !nothing_to_tell(group)) *value /= scale;
    }
  }
  return result;
}

Grouped leave_one_out(const Grouped& rewards) {
  Grouped result = rewards;
  for (size_t prompt = 0; prompt < rewards.size(); ++prompt) {
    const auto all = present(rewards[prompt]);
    for (Number& value : result[prompt]) {
      if (!value) continue;
      const double others = std::accumulate(all.begin(), all.end(), 0.0) - *value;
      value = nothing_to_tell(rewards[prompt]) ? 0.0 : *value - others / double(all.size() - 1);
    }
  }
  return result;
}

Grouped whitened_over_tokens(const Grouped& rewards, const Batch& batch) {
  Grouped centered;
  std::vector<double> by_token;
  for (size_t prompt = 0; prompt < rewards.size(); ++prompt) {
    centered.push_back(less_its_mean(rewards[prompt]));
    for (size_t member = 0; member < rewards[prompt].size(); ++member) {
      if (!centered[prompt][member]) continue;
      for (const double counts : token_mask(batch[prompt].responses[member])) {
        if (counts != 0.0) by_token.push_back(*centered[prompt][member]);
      }
    }
  }
  constexpr double kSmall = 1e-8;  // verl's, in masked_whiten
  const double scale = std::sqrt(unbiased_variance(by_token) + kSmall);
  for (auto& group : centered) {
    for (Number& value : group) {
      if (value) value = (*value - mean(by_token)) / scale;
    }
  }
  return centered;
}

// Parts of every response that has no given advantage, [part][prompt][member].
std::vector<Grouped> parts_of(const Batch& batch) {
  std::vector<Grouped> parts;
  for (size_t prompt = 0; prompt < batch.size(); ++prompt) {
    for (size_t member = 0; member < batch[prompt].responses.size(); ++member) {
      const Response& response = batch[prompt].responses[member];
      // One reward function is a sum of one part.
      const auto own = response.reward_parts.empty() ? std::vector<Number>{response.reward} : response.reward_parts;
      if (parts.empty()) parts.resize(own.size(), Grouped(batch.size()));
      if (own.size() != parts.size()) {
        throw ConfigError(fmt::format(
            "objective.multi_objective_aggregation: normalize_then_sum needs the same rewards of every response; prompt {} "
            "response {} has {} parts, wanted {}",
            batch[prompt].prompt_id, member, own.size(), parts.size()));
      }
      for (size_t k = 0; k < own.size(); ++k) parts[k][prompt].push_back(response.advantage ? Number() : own[k]);
    }
  }
  return parts;
}

Grouped normalized_then_summed(const Batch& batch, const ObjectiveConfig& config) {
  const std::vector<Grouped> parts = parts_of(batch);
  Grouped sums;
  std::vector<bool> tells_nothing;
  for (size_t prompt = 0; prompt < batch.size(); ++prompt) {
    auto& row = sums.emplace_back(batch[prompt].responses.size());
    tells_nothing.push_back(true);
    for (size_t k = 0; k < parts.size(); ++k) {
      const auto& group = parts[k][prompt];
      if (!nothing_to_tell(group)) tells_nothing.back() = false;
      const double scale = deviation(present(group)) + config.advantage_epsilon;
      const auto centered = less_its_mean(group);
      for (size_t member = 0; member < row.size(); ++member) {
        if (!centered[member]) continue;
        const double z = nothing_to_tell(group) ? 0.0 : *centered[member] / scale;
        row[member] = row[member].value_or(0.0) + weight_of(config, k) * z;
      }
    }
  }
  const auto all = present(sums);
  for (size_t prompt = 0; prompt < batch.size(); ++prompt) {
    for (Number& value : sums[prompt]) {
      if (value) value = tells_nothing[prompt] ? 0.0 : (*value - mean(all)) / (deviation(all) + config.advantage_epsilon);
    }
  }
  return sums;
}

Grouped estimated(const Batch& batch, const ObjectiveConfig& config, const TokenScores& scores) {
  const Grouped rewards = rewards_of(batch, config, scores);
  if (config.multi_objective_aggregation == RewardAggregation::kNormalizeThenSum) {
    if (config.advantage_estimator != AdvantageEstimator::kGrpo) {
      throw ConfigError("objective.multi_objective_aggregation: normalize_then_sum is defined with advantage_estimator: grpo only");
    }
    if (config.kl_in == KlPlace::kReward && config.beta > 0) {
      throw ConfigError(
          "objective.multi_objective_aggregation: normalize_then_sum has no sum of rewards that kl_in: reward could reduce");
    }
    return normalized_then_summed(batch, config);
  }
  switch (config.advantage_estimator) {
    case AdvantageEstimator::kGrpo: return relative_to_group(rewards, config);
    case AdvantageEstimator::kRloo: return leave_one_out(rewards);
    case AdvantageEstimator::kReinforcePlusPlusBaseline: return whitened_over_tokens(rewards, batch);
  }
  throw ConfigError("objective.advantage_estimator: unknown");
}

}  // namespace

std::vector<std::vector<double>> advantages(const Batch& batch, const ObjectiveConfig& config, const TokenScores& scores) {
  const Grouped found = estimated(batch, config, scores);
  std::vector<std::vector<double>> result;
  for (size_t prompt = 0; prompt < batch.size(); ++prompt) {
    auto& row = result.emplace_back();
    for (size_t member = 0; member < batch[prompt].responses.size(); ++member) {
      row.push_back(batch[prompt].responses[member].advantage.value_or(found[prompt][member].value_or(0.0)));
    }
  }
  return result;
}

std::vector<double> token_mask(const Response& response) {
  std::vector<double> mask(response.completion_ids.size(), 1.0);
  if (response.completion_mask) {
    std::transform(response.completion_mask->begin(), response.completion_mask->end(), mask.begin(),
                   [](uint8_t counts) { return counts ? 1.0 : 0.0; });
  }
  return mask;
}

}  // namespace longstraw::reference
