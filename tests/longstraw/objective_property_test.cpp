// What must hold of every objective: its derivatives are those of its loss over whole responses, a step may be cut anywhere,
// and what is said to have no gradient has none.
#include "longstraw/objective.h"

#include "core/config/enums.h"
#include "tests/longstraw/random_step.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>

namespace longstraw {
namespace {

using namespace core::objective;
using core::data::Batch;
using test::random_step;
using test::Step;
using Rows = std::vector<std::vector<std::vector<double>>>;  // [prompt][member][token]

constexpr int64_t kMaxLength = 9;

struct Total {
  double loss = 0.0, size = 0.0;
  Rows derivatives, entropy_derivatives;
};

Total total(const Step& step, const ObjectiveConfig& config) {
  const GrpoObjective objective(step.batch, config, 1.0, kMaxLength, step.scores);
  Total total;
  for (size_t p = 0; p < step.batch.size(); ++p) {
    total.derivatives.emplace_back();
    total.entropy_derivatives.emplace_back();
    for (size_t m = 0; m < step.batch[p].responses.size(); ++m) {
      auto& row = total.derivatives[p].emplace_back();
      auto& entropy_row = total.entropy_derivatives[p].emplace_back();
      for (size_t t = 0; t < step.scores.logprobs[p][m].size(); ++t) {
        const TokenLoss token = objective.token(p, m, t, step.scores.logprobs[p][m][t], step.scores.entropies[p][m][t]);
        total.loss += token.policy + token.kl + token.entropy;
        total.size += std::abs(token.policy) + std::abs(token.kl) + std::abs(token.entropy);
        row.push_back(token.derivative);
        entropy_row.push_back(token.entropy_derivative);
      }
    }
  }
  return total;
}

ObjectiveConfig configured(LossType type, Dialect dialect) {
  ObjectiveConfig config;
  config.loss_type = type;
  config.dialect = dialect;
  config.epsilon_high = 0.28;
  config.beta = 0.1;
  config.entropy_coef = 0.05;
  return config;
}

constexpr std::array kTypes{LossType::kGrpo, LossType::kDrGrpo, LossType::kDapo, LossType::kBnpo,     LossType::kGspo,
                            LossType::kSapo, LossType::kGmpo,   LossType::kRloo, LossType::kReinforce};

// The central difference of the loss, all of it made anew from the moved log-probs: scores, masks, ratios.
void expect_derivatives_of_the_loss(const Step& step, const ObjectiveConfig& config) {
  const Total analytic = total(step, config);
  // Error of a step h: h²/6 |f'''| (below 2e-9 for f''' up to 100) and roundings of f over h (1e-15 / 1e-5).
  constexpr double kMove = 1e-5, kTolerance = 3e-9;
  for (size_t p = 0; p < step.batch.size(); ++p) {
    for (size_t m = 0; m < step.batch[p].responses.size(); ++m) {
      for (size_t t = 0; t < step.scores.logprobs[p][m].size(); ++t) {
        Step above = step, below = step;
        above.scores.logprobs[p][m][t] += kMove;
        below.scores.logprobs[p][m][t] -= kMove;
        const double numeric = (total(above, config).loss - total(below, config).loss) / (2 * kMove);
        EXPECT_NEAR(analytic.derivatives[p][m][t], numeric, kTolerance) << p << " " << m << " " << t;
        above = below = step;
        above.scores.entropies[p][m][t] += kMove;
        below.scores.entropies[p][m][t] -= kMove;
        const double numeric_entropy = (total(above, config).loss - total(below, config).loss) / (2 * kMove);
        EXPECT_NEAR(analytic.entropy_derivatives[p][m][t], numeric_entropy, kTolerance) << p << " " << m << " " << t;
      }
    }
  }
}

TEST(ObjectiveDerivatives, OfEveryTypeAreThoseOfTheLossOverWholeResponses) {
  for (const LossType type : kTypes) {
    for (const Dialect dialect : {Dialect::kTrl, Dialect::kVerl}) {
      for (const uint64_t seed : {1u, 2u}) {
        SCOPED_TRACE(core::config::name_of(type));
        ObjectiveConfig config = configured(type, dialect);
        config.kl = std::array{Kl::kK3, Kl::kK2, Kl::kK1}[seed % 3];
        expect_derivatives_of_the_loss(random_step(seed, {}), config);
      }
    }
  }
}

TEST(ObjectiveDerivatives, OfSharedRatiosUnderTokenWeightsAndMasks) {
  for (const LossType type : {LossType::kGrpo, LossType::kDapo, LossType::kGspo, LossType::kSapo}) {
    for (const auto correction : {SamplerCorrection::kTokenTruncate, SamplerCorrection::kTokenMask}) {
      for (const double quantile : {1.0, 0.6}) {
        SCOPED_TRACE(core::config::name_of(type));
        ObjectiveConfig config = configured(type, Dialect::kTrl);
        config.importance_sampling_level = ImportanceSamplingLevel::kSequence;
        config.importance_sampling_correction = correction;
        config.importance_sampling_cap = 1.2;
        config.importance_sampling_min = 0.8;
        config.top_entropy_quantile = quantile;
        expect_derivatives_of_the_loss(random_step(3, {}), config);
      }
    }
  }
}

TEST(ObjectiveDerivatives, OfAKlThatTheRatioMultiplies) {
  for (const LossType type : kTypes) {
    const bool can_share = type != LossType::kGmpo && type != LossType::kRloo && type != LossType::kReinforce;
    for (const auto level : {ImportanceSamplingLevel::kToken, ImportanceSamplingLevel::kSequence}) {
      if (level == ImportanceSamplingLevel::kSequence && !can_share) continue;
      for (const Kl kl : {Kl::kK1, Kl::kK2, Kl::kK3}) {
        SCOPED_TRACE(core::config::name_of(type));
        ObjectiveConfig config = configured(type, Dialect::kTrl);
        config.importance_sampling_level = level;
        config.kl = kl;
        config.use_bias_correction_kl = true;
        const Step step = random_step(8, {});
        expect_derivatives_of_the_loss(step, config);
        ObjectiveConfig plain = config;
        plain.use_bias_correction_kl = false;
        EXPECT_NE(total(step, config).loss, total(step, plain).loss);
      }
    }
  }
}

TEST(ObjectiveDerivatives, OfDualClipAndCap) {
  ObjectiveConfig config = configured(LossType::kGrpo, Dialect::kTrl);
  config.delta = 1.35;
  config.clip_ratio_c = 1.3;
  for (const uint64_t seed : {4u, 5u, 6u}) expect_derivatives_of_the_loss(random_step(seed, {}), config);
}

// cispo's ratio is a constant to its gradient: the loss with the ratio held is linear in the log-prob.
TEST(ObjectiveDerivatives, OfCispoLeaveTheRatioAlone) {
  for (const Dialect dialect : {Dialect::kTrl, Dialect::kVerl}) {
    ObjectiveConfig config = configured(LossType::kCispo, dialect);
    config.beta = config.entropy_coef = 0.0;
    const Step step = random_step(7, {.given_advantages = true});
    const GrpoObjective objective(step.batch, config, 1.0, kMaxLength);
    for (size_t t = 0; t < step.scores.logprobs[0][0].size(); ++t) {
      const double logprob = step.scores.logprobs[0][0][t];
      const TokenLoss token = objective.token(0, 0, t, logprob, 0.0);
      EXPECT_DOUBLE_EQ(token.derivative * logprob, token.policy);
    }
  }
}

ObjectiveConfig any_config(bool with_entropies) {
  const auto pick = [](auto values) { return *rc::gen::elementOf(std::vector(values.begin(), values.end())); };
  ObjectiveConfig config;
  config.loss_type = pick(std::array{LossType::kGrpo, LossType::kDrGrpo, LossType::kDapo, LossType::kBnpo, LossType::kGspo,
                                     LossType::kCispo, LossType::kSapo, LossType::kGmpo, LossType::kRloo, LossType::kReinforce});
  config.dialect = pick(std::array{Dialect::kTrl, Dialect::kVerl});
  const bool whole = config.loss_type == LossType::kGmpo || config.loss_type == LossType::kRloo;
  if (!whole && *rc::gen::arbitrary<bool>()) {
    config.aggregation = pick(std::array{Aggregation::kSeqMeanTokenMean, Aggregation::kTokenMean, Aggregation::kSeqMeanTokenSum,
                                         Aggregation::kSeqMeanTokenSumNorm});
  }
  config.beta = pick(std::array{0.0, 0.3});
  config.kl = pick(std::array{Kl::kK1, Kl::kK2, Kl::kK3});
  config.use_bias_correction_kl = pick(std::array<std::optional<bool>, 3>{std::nullopt, true, false});
  config.importance_sampling_correction = pick(std::array{SamplerCorrection::kNone, SamplerCorrection::kSequenceMask});
  config.importance_sampling_cap = 1.3;
  if (with_entropies) config.entropy_coef = pick(std::array{0.0, 0.1});
  if (with_entropies && !whole) config.top_entropy_quantile = pick(std::array{1.0, 0.5});
  return config;
}

// Σ m of some responses, for the share that a part of a step has in a mean over tokens.
double counted(const Batch& batch) {
  double tokens = 0.0;
  for (const auto& group : batch) {
    for (const auto& response : group.responses) {
      for (const uint8_t m : *response.completion_mask) tokens += m;
    }
  }
  return tokens;
}

bool is_token_mean(const ObjectiveConfig& config) {
  if (config.aggregation) return config.aggregation == Aggregation::kTokenMean;
  return config.loss_type == LossType::kDapo || config.loss_type == LossType::kBnpo || config.loss_type == LossType::kCispo;
}

Step one_response(const Step& step, size_t p, size_t m) {
  Step one{.batch = {step.batch[p]}, .scores = {{{step.scores.logprobs[p][m]}}, {{step.scores.entropies[p][m]}}}};
  one.batch[0].responses = {step.batch[p].responses[m]};
  return one;
}

RC_GTEST_PROP(ObjectiveProperty, ResponsesByThemselvesAddUpToTheStep, ()) {
  const Step step =
      random_step(*rc::gen::inRange<uint64_t>(0, 1000), {.old = *rc::gen::arbitrary<bool>(), .given_advantages = true});
  const ObjectiveConfig config = any_config(/*with_entropies=*/false);
  const Total whole = total(step, config);
  double loss = 0.0;
  const double responses = double(step.batch.size() * step.batch[0].responses.size());
  for (size_t p = 0; p < step.batch.size(); ++p) {
    for (size_t m = 0; m < step.batch[p].responses.size(); ++m) {
      const Step one = one_response(step, p, m);
      const Total alone = total(one, config);
      const double share = is_token_mean(config) ? counted(one.batch) / counted(step.batch) : 1.0 / responses;
      loss += share * alone.loss;
      for (size_t t = 0; t < whole.derivatives[p][m].size(); ++t) {
        // A weight is a product of three roundings.
        RC_ASSERT(std::abs(share * alone.derivatives[0][0][t] - whole.derivatives[p][m][t]) <=
                  1e-15 * (1.0 + std::abs(whole.derivatives[p][m][t])));
      }
    }
  }
  RC_ASSERT(std::abs(loss - whole.loss) <= 1e-14 * (1.0 + whole.size));  // some 60 terms
}

RC_GTEST_PROP(ObjectiveProperty, OrderOfPromptsAndMembersDoesNotMatter, ()) {
  const Step step = random_step(*rc::gen::inRange<uint64_t>(0, 1000), {.prompts = 3, .old = *rc::gen::arbitrary<bool>()});
  const ObjectiveConfig config = any_config(/*with_entropies=*/true);
  Step turned = step;
  const auto reverse = [](auto& rows) { std::reverse(rows.begin(), rows.end()); };
  reverse(turned.batch), reverse(turned.scores.logprobs), reverse(turned.scores.entropies);
  for (size_t p = 0; p < turned.batch.size(); ++p) {
    reverse(turned.batch[p].responses), reverse(turned.scores.logprobs[p]), reverse(turned.scores.entropies[p]);
  }
  const Total whole = total(step, config);
  Total other = total(turned, config);
  reverse(other.derivatives);
  for (size_t p = 0; p < step.batch.size(); ++p) {
    reverse(other.derivatives[p]);
    for (size_t m = 0; m < whole.derivatives[p].size(); ++m) {
      for (size_t t = 0; t < whole.derivatives[p][m].size(); ++t) {
        // Advantages differ by roundings of their means.
        RC_ASSERT(std::abs(whole.derivatives[p][m][t] - other.derivatives[p][m][t]) <= 1e-13);
      }
    }
  }
}

RC_GTEST_PROP(ObjectiveProperty, WhatHasNoGradientHasNoneWhateverItsLogprobs, ()) {
  Step step = random_step(*rc::gen::inRange<uint64_t>(0, 1000), {.old = *rc::gen::arbitrary<bool>()});
  const ObjectiveConfig config = any_config(/*with_entropies=*/true);
  for (auto& response : step.batch[0].responses) response.reward = 0.5;
  for (auto& m : *step.batch[1].responses[0].completion_mask) m = 0;
  const GrpoObjective objective(step.batch, config, 1.0, kMaxLength, step.scores);
  RC_ASSERT(!objective.has_gradient(1, 0));
  for (size_t p = 0; p < step.batch.size(); ++p) {
    for (size_t m = 0; m < step.batch[p].responses.size(); ++m) {
      bool any = false;
      for (size_t t = 0; t < step.scores.logprobs[p][m].size(); ++t) {
        for (const double moved : {-0.3, 0.0, 0.3}) {
          const TokenLoss token = objective.token(p, m, t, step.scores.logprobs[p][m][t] + moved, 1.0);
          any |= token.derivative != 0.0 || token.entropy_derivative != 0.0;
        }
      }
      if (any) RC_ASSERT(objective.has_gradient(p, m));
      const bool more = config.beta > 0.0 || config.entropy_coef > 0.0;
      if (p == 0 && !more) RC_ASSERT(!objective.has_gradient(p, m));
    }
  }
}

}  // namespace
}  // namespace longstraw
