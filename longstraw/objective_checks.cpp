// What is refused, and why. Whatever a key can't do is said here rather than ignored.
#include "longstraw/objective.h"
#include "longstraw/token_loss.h"

#include "core/base/errors.h"
#include "core/config/enums.h"

#include <fmt/format.h>

namespace longstraw {
namespace {

using namespace core::objective;

std::string name_of(auto value) { return std::string(core::config::name_of(value)); }

[[noreturn]] void refuse(const std::string& key, const std::string& got, const std::string& why) {
  throw ConfigError(fmt::format("objective.{}: {}: {}", key, got, why));
}

bool is_clipped(LossType type) {
  return type == LossType::kGrpo || type == LossType::kDrGrpo || type == LossType::kDapo || type == LossType::kBnpo;
}

void check_ratio(const ObjectiveConfig& config) {
  const LossType type = config.loss_type;
  const bool sequence = config.importance_sampling_level == ImportanceSamplingLevel::kSequence;
  if (sequence && (has_one_loss(type) || type == LossType::kReinforce)) {
    refuse("importance_sampling_level", "sequence",
           fmt::format("loss_type {} {}; leave it token", name_of(type),
                       type == LossType::kReinforce ? "has no ratio" : "has a ratio of the whole response of its own"));
  }
  if (config.delta && !is_clipped(type) && type != LossType::kGspo) {
    refuse("delta", fmt::format("{}", *config.delta),
           fmt::format("loss_type {} has no cap on its ratio; leave it null", name_of(type)));
  }
  if (config.clip_ratio_c && (!is_clipped(type) || sequence)) {
    refuse("clip_ratio_c", fmt::format("{}", *config.clip_ratio_c),
           fmt::format("dual clip is of the clipped ratio of a token (grpo, dr_grpo, dapo, bnpo), not of {}{}; leave it null",
                       name_of(type), sequence ? " with ratios of whole responses" : ""));
  }
}

// gmpo and rloo: one loss a response, which no part of its tokens has a share in.
void check_one_loss(const ObjectiveConfig& config) {
  if (!has_one_loss(config.loss_type)) return;
  const std::string type = name_of(config.loss_type);
  if (config.aggregation && *config.aggregation != Aggregation::kSeqMeanTokenMean) {
    refuse("aggregation", name_of(*config.aggregation),
           fmt::format("loss_type {} has one loss a response, and their mean is the loss; leave it null", type));
  }
  if (config.top_entropy_quantile < 1.0) {
    refuse("top_entropy_quantile", fmt::format("{}", config.top_entropy_quantile),
           fmt::format("loss_type {} has one loss a response, none a token that could be left out; leave it 1", type));
  }
  const SamplerCorrection correction = config.importance_sampling_correction;
  const bool truncates = correction == SamplerCorrection::kTokenTruncate;
  if (correction == SamplerCorrection::kTokenMask || (truncates && config.loss_type == LossType::kRloo)) {
    refuse(
        "importance_sampling_correction", name_of(correction),
        fmt::format("loss_type {} has one loss a response, none a token to correct; take one of whole sequences, or none", type));
  }
}

void check_kl(const ObjectiveConfig& config) {
  if (config.use_bias_correction_kl.value_or(false) && config.beta > 0.0 && config.kl_in == KlPlace::kReward) {
    refuse("use_bias_correction_kl", "true",
           "kl_in: reward leaves no KL term in the loss that a ratio could multiply; leave it null");
  }
}

void check_advantages(const ObjectiveConfig& config) {
  if (config.multi_objective_aggregation != RewardAggregation::kNormalizeThenSum) return;
  const std::string key = "multi_objective_aggregation", got = "normalize_then_sum";
  if (config.advantage_estimator != AdvantageEstimator::kGrpo) {
    refuse(key, got, fmt::format("advantage_estimator {} is of the sum of the rewards", name_of(config.advantage_estimator)));
  }
  if (config.beta > 0.0 && config.kl_in == KlPlace::kReward) {
    refuse(key, got, "kl_in: reward takes the KL term off the sum of the rewards, which is normalized away here");
  }
  if (config.dialect == Dialect::kVerl) {
    refuse(key, got, "under dialect verl the sum is whitened over tokens, which is not there; take dialect trl");
  }
}

}  // namespace

void check_objective(const ObjectiveConfig& config) {
  check_ratio(config);
  check_one_loss(config);
  check_kl(config);
  check_advantages(config);
  if (config.importance_sampling_min > config.importance_sampling_cap) {
    refuse("importance_sampling_min", fmt::format("{}", config.importance_sampling_min),
           fmt::format("above importance_sampling_cap, {}", config.importance_sampling_cap));
  }
}

bool needs_scores(const core::data::Batch& batch, const ObjectiveConfig& config) {
  if (config.top_entropy_quantile < 1.0) return true;
  const bool kl_in_reward = config.beta > 0.0 && config.kl_in == KlPlace::kReward;
  // KL terms that share a ratio are needed for its gradient even where it is 1.
  if (kl_is_coupled(config)) return true;
  const bool coupled = is_coupled(config);
  for (const auto& group : batch) {
    for (const auto& response : group.responses) {
      // Without old log-probs a ratio is 1 whatever the policy, and the policy that sampled is that of the step.
      if (response.old_logprobs ? coupled : kl_in_reward && !response.advantage) return true;
    }
  }
  return false;
}

}  // namespace longstraw
