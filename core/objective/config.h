#pragma once
// Section `objective`: advantages, the token loss and how token losses are averaged, in the names of TRL's GRPOConfig where
// it has one and of verl's where that has one. docs/objectives.md has every formula.

#include "core/config/fields.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace longstraw::core::objective {

enum class LossType { kGrpo, kDrGrpo, kDapo, kBnpo, kGspo, kCispo, kSapo, kGmpo, kRloo, kReinforce };
constexpr auto names_of(LossType) {
  using config::EnumName;
  return std::array{EnumName{LossType::kGrpo, "grpo"}, EnumName{LossType::kDrGrpo, "dr_grpo"},
                    EnumName{LossType::kDapo, "dapo"}, EnumName{LossType::kBnpo, "bnpo"},
                    EnumName{LossType::kGspo, "gspo"}, EnumName{LossType::kCispo, "cispo"},
                    EnumName{LossType::kSapo, "sapo"}, EnumName{LossType::kGmpo, "gmpo"},
                    EnumName{LossType::kRloo, "rloo"}, EnumName{LossType::kReinforce, "reinforce"}};
}

// Whose formula where two share a name; docs/objectives.md lists where.
enum class Dialect { kTrl, kVerl };
constexpr auto names_of(Dialect) {
  using config::EnumName;
  return std::array{EnumName{Dialect::kTrl, "trl"}, EnumName{Dialect::kVerl, "verl"}};
}

// B responses, T_i counted tokens of response i, all of the whole optimizer step.
enum class Aggregation {
  kSeqMeanTokenMean,     // 1/B Σ_i Σ_t l m / T_i
  kTokenMean,            // Σ l m / Σ m
  kSeqMeanTokenSum,      // 1/B Σ_i Σ_t l m
  kSeqMeanTokenSumNorm,  // Σ l m / (B · max_completion_length)
};
constexpr auto names_of(Aggregation) {
  using config::EnumName;
  return std::array{EnumName{Aggregation::kSeqMeanTokenMean, "seq-mean-token-mean"},
                    EnumName{Aggregation::kTokenMean, "token-mean"}, EnumName{Aggregation::kSeqMeanTokenSum, "seq-mean-token-sum"},
                    EnumName{Aggregation::kSeqMeanTokenSumNorm, "seq-mean-token-sum-norm"}};
}

enum class ImportanceSamplingLevel { kToken, kSequence };
constexpr auto names_of(ImportanceSamplingLevel) {
  using config::EnumName;
  return std::array{EnumName{ImportanceSamplingLevel::kToken, "token"}, EnumName{ImportanceSamplingLevel::kSequence, "sequence"}};
}

enum class AdvantageEstimator { kGrpo, kRloo, kReinforcePlusPlusBaseline };
constexpr auto names_of(AdvantageEstimator) {
  using config::EnumName;
  return std::array{EnumName{AdvantageEstimator::kGrpo, "grpo"}, EnumName{AdvantageEstimator::kRloo, "rloo"},
                    EnumName{AdvantageEstimator::kReinforcePlusPlusBaseline, "reinforce_plus_plus_baseline"}};
}

enum class ScaleRewards { kGroup, kBatch, kNone };
constexpr auto names_of(ScaleRewards) {
  using config::EnumName;
  return std::array{EnumName{ScaleRewards::kGroup, "group"}, EnumName{ScaleRewards::kBatch, "batch"},
                    EnumName{ScaleRewards::kNone, "none"}};
}

enum class RewardAggregation { kSumThenNormalize, kNormalizeThenSum };
constexpr auto names_of(RewardAggregation) {
  using config::EnumName;
  return std::array{EnumName{RewardAggregation::kSumThenNormalize, "sum_then_normalize"},
                    EnumName{RewardAggregation::kNormalizeThenSum, "normalize_then_sum"}};
}

enum class Kl { kK1, kK2, kK3 };
constexpr auto names_of(Kl) {
  using config::EnumName;
  return std::array{EnumName{Kl::kK1, "k1"}, EnumName{Kl::kK2, "k2"}, EnumName{Kl::kK3, "k3"}};
}

enum class KlPlace { kLoss, kReward };
constexpr auto names_of(KlPlace) {
  using config::EnumName;
  return std::array{EnumName{KlPlace::kLoss, "loss"}, EnumName{KlPlace::kReward, "reward"}};
}

enum class SamplerCorrection { kNone, kTokenTruncate, kTokenMask, kSequenceTruncate, kSequenceMask };
constexpr auto names_of(SamplerCorrection) {
  using config::EnumName;
  return std::array{EnumName{SamplerCorrection::kNone, "none"}, EnumName{SamplerCorrection::kTokenTruncate, "token_truncate"},
                    EnumName{SamplerCorrection::kTokenMask, "token_mask"},
                    EnumName{SamplerCorrection::kSequenceTruncate, "sequence_truncate"},
                    EnumName{SamplerCorrection::kSequenceMask, "sequence_mask"}};
}

struct ObjectiveConfig {
  LossType loss_type = LossType::kGrpo;
  Dialect dialect = Dialect::kTrl;
  std::optional<Aggregation> aggregation;
  ImportanceSamplingLevel importance_sampling_level = ImportanceSamplingLevel::kToken;
  double epsilon = 0.2;
  std::optional<double> epsilon_high;
  std::optional<double> delta;
  std::optional<double> clip_ratio_c;
  double sapo_temperature_pos = 1.0;
  double sapo_temperature_neg = 1.05;
  AdvantageEstimator advantage_estimator = AdvantageEstimator::kGrpo;
  ScaleRewards scale_rewards = ScaleRewards::kGroup;
  double advantage_epsilon = 1e-4;
  std::optional<std::vector<double>> reward_weights;
  RewardAggregation multi_objective_aggregation = RewardAggregation::kSumThenNormalize;
  double beta = 0.0;
  Kl kl = Kl::kK3;
  KlPlace kl_in = KlPlace::kLoss;
  std::optional<bool> use_bias_correction_kl;
  double entropy_coef = 0.0;
  double top_entropy_quantile = 1.0;
  SamplerCorrection importance_sampling_correction = SamplerCorrection::kSequenceMask;
  double importance_sampling_cap = 3.0;
  double importance_sampling_min = 0.0;

  static constexpr auto fields() {
    using namespace config;
    using C = ObjectiveConfig;
    return std::tuple{
        field("loss_type", &C::loss_type, "the token loss, and with it how token losses are averaged"),
        field("dialect", &C::dialect, "whose formula where TRL and verl differ under one name (cispo, gspo, k3, entropy bonus)"),
        field("aggregation", &C::aggregation, "how token losses are averaged; null: as loss_type does"),
        field("importance_sampling_level", &C::importance_sampling_level, "ratio of each token, or of the whole response"),
        field("epsilon", &C::epsilon, "the ratio is clipped below at 1 - epsilon", at_least(0)),
        field("epsilon_high", &C::epsilon_high,
              "the ratio is clipped above at 1 + epsilon_high (cispo of TRL: the bound itself); null: epsilon", at_least(0)),
        field("delta", &C::delta, "cap on the ratio before clipping; null: none", above(0)),
        field("clip_ratio_c", &C::clip_ratio_c, "dual clip: for negative advantages the loss is at most -c A; null: none",
              above(1)),
        field("sapo_temperature_pos", &C::sapo_temperature_pos, "of sapo, for positive advantages", above(0)),
        field("sapo_temperature_neg", &C::sapo_temperature_neg, "of sapo, for the others", above(0)),
        field("advantage_estimator", &C::advantage_estimator, "how rewards of a group become advantages"),
        field("scale_rewards", &C::scale_rewards, "whose standard deviation divides the advantages"),
        field("advantage_epsilon", &C::advantage_epsilon, "added to the standard deviation of the rewards", at_least(0)),
        field("reward_weights", &C::reward_weights, "weight of each reward function; null: 1 each"),
        field("multi_objective_aggregation", &C::multi_objective_aggregation,
              "several rewards: added and then normalized, or (GDPO) normalized each and then added"),
        field("beta", &C::beta, "weight of the KL term; above 0 it needs ref_logprobs", at_least(0)),
        field("kl", &C::kl, "estimator of the KL term in the loss"),
        field("kl_in", &C::kl_in, "where the KL term goes: into the loss, or (summed, k1) off the reward"),
        field("use_bias_correction_kl", &C::use_bias_correction_kl,
              "multiplies the KL term in the loss by the ratio, gradient and all; null: for k3 under dialect trl, as TRL does"),
        field("entropy_coef", &C::entropy_coef, "weight of the entropy bonus", at_least(0)),
        field("top_entropy_quantile", &C::top_entropy_quantile,
              "share of the step's tokens, those of highest entropy, that have a loss", above_up_to(0, 1)),
        field("importance_sampling_correction", &C::importance_sampling_correction,
              "weights exp(old - sampling log-prob) for responses of another engine (those with both columns)"),
        field("importance_sampling_cap", &C::importance_sampling_cap, "largest weight of that correction", above(0)),
        field("importance_sampling_min", &C::importance_sampling_min,
              "its smallest weight: below, truncating ones raise it, masking ones drop it", at_least(0)),
    };
  }
  bool operator==(const ObjectiveConfig&) const = default;
};

}  // namespace longstraw::core::objective
