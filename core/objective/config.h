#pragma once
// Section `objective`: the loss, in the names of TRL's GRPOConfig.

#include "core/config/fields.h"

#include <optional>

namespace longstraw::core::objective {

enum class LossType { kGrpo, kDrGrpo, kDapo, kBnpo };
constexpr auto names_of(LossType) {
  using config::EnumName;
  return std::array{EnumName{LossType::kGrpo, "grpo"}, EnumName{LossType::kDrGrpo, "dr_grpo"}, EnumName{LossType::kDapo, "dapo"},
                    EnumName{LossType::kBnpo, "bnpo"}};
}

enum class ScaleRewards { kGroup, kBatch, kNone };
constexpr auto names_of(ScaleRewards) {
  using config::EnumName;
  return std::array{EnumName{ScaleRewards::kGroup, "group"}, EnumName{ScaleRewards::kBatch, "batch"},
                    EnumName{ScaleRewards::kNone, "none"}};
}

enum class Kl { kK1, kK2, kK3 };
constexpr auto names_of(Kl) {
  using config::EnumName;
  return std::array{EnumName{Kl::kK1, "k1"}, EnumName{Kl::kK2, "k2"}, EnumName{Kl::kK3, "k3"}};
}

struct ObjectiveConfig {
  LossType loss_type = LossType::kGrpo;
  ScaleRewards scale_rewards = ScaleRewards::kGroup;
  double beta = 0.0;
  Kl kl = Kl::kK3;
  double epsilon = 0.2;
  std::optional<double> epsilon_high;
  std::optional<double> delta;
  double advantage_epsilon = 1e-4;

  static constexpr auto fields() {
    using namespace config;
    using C = ObjectiveConfig;
    return std::tuple{
        field("loss_type", &C::loss_type, "how token losses are averaged"),
        field("scale_rewards", &C::scale_rewards, "whose standard deviation divides the advantages"),
        field("beta", &C::beta, "weight of the KL term; above 0 it needs ref_logprobs", at_least(0)),
        field("kl", &C::kl, "estimator of the KL term"),
        field("epsilon", &C::epsilon, "the ratio is clipped below at 1 - epsilon", at_least(0)),
        field("epsilon_high", &C::epsilon_high, "the ratio is clipped above at 1 + epsilon_high; null: epsilon", at_least(0)),
        field("delta", &C::delta, "cap on the ratio before clipping; null: none", above(0)),
        field("advantage_epsilon", &C::advantage_epsilon, "added to the standard deviation of the rewards", at_least(0)),
    };
  }
  bool operator==(const ObjectiveConfig&) const = default;
};

}  // namespace longstraw::core::objective
