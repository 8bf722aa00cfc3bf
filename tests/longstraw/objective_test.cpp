// The streaming objective against TRL's own values, published hand values, and its own finite differences.
#include "longstraw/objective.h"

#include "core/base/errors.h"
#include "core/config/load.h"
#include "tests/support/objective_golden.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace longstraw {
namespace {

using core::data::Batch;
using core::data::Response;
using core::objective::ObjectiveConfig;
using nlohmann::json;
using Rows = std::vector<std::vector<double>>;

Batch one_token(double advantage, std::optional<double> old_logprob, std::optional<double> ref_logprob = {}) {
  Response response{.completion_ids = {0}, .advantage = advantage};
  if (old_logprob) response.old_logprobs = {*old_logprob};
  if (ref_logprob) response.ref_logprobs = {*ref_logprob};
  return {{.prompt_id = "p", .prompt_ids = {0}, .responses = {response}}};
}

TokenLoss of_one_token(const Batch& batch, const ObjectiveConfig& config, double logprob) {
  return GrpoObjective(batch, config, 1.0, 1).token(0, 0, 0, logprob, 0.0);
}

// |a − b| over all entries, and |b|.
struct Distance {
  double squares = 0.0, norm = 0.0;
  void add(double got, double wanted) { squares += std::pow(got - wanted, 2), norm += std::pow(wanted, 2); }
  bool within(double bound) const { return std::sqrt(squares) <= bound * std::sqrt(norm); }
};

TEST(StreamingObjective, AgreesWithTrlAndVerlOnEveryGoldenCase) {
  ASSERT_GT(test::objective_cases().size(), 200u);
  for (const json& c : test::objective_cases()) {
    SCOPED_TRACE(c.at("name").get<std::string>());
    const Batch batch = test::objective_batch(c);
    const ObjectiveConfig config = test::objective_config(c.at("objective"));
    const core::model::TokenScores scores = test::objective_scores(c);
    const GrpoObjective objective(batch, config, 1.0, c.at("max_completion_length"), scores);
    const auto wanted = c.at("grad_logprobs").get<Rows>();
    const auto wanted_entropy = c.at("grad_entropies").is_null() ? Rows() : c["grad_entropies"].get<Rows>();
    const auto advantages = c.at("advantages").get<std::vector<double>>();
    double loss = 0.0;
    Distance of_advantages, of_logprobs, of_entropies;
    size_t row = 0;
    for (size_t p = 0; p < batch.size(); ++p) {
      for (size_t m = 0; m < batch[p].responses.size(); ++m, ++row) {
        of_advantages.add(objective.advantages()[p][m], advantages[row]);
        double derivatives = 0.0;
        for (size_t t = 0; t < wanted[row].size(); ++t) {
          const double entropy = objective.wants_entropy() ? scores.entropies[p][m][t] : 0.0;
          const TokenLoss token = objective.token(p, m, t, scores.logprobs[p][m][t], entropy);
          loss += token.policy + token.kl + token.entropy;
          derivatives += std::abs(token.derivative) + std::abs(token.entropy_derivative);
          of_logprobs.add(token.derivative, wanted[row][t]);
          of_entropies.add(token.entropy_derivative, wanted_entropy.empty() ? 0.0 : wanted_entropy[row][t]);
        }
        EXPECT_TRUE(derivatives == 0.0 || objective.has_gradient(p, m));
      }
    }
    const double bound = c.at("bound");
    EXPECT_TRUE(of_advantages.within(bound)) << std::sqrt(of_advantages.squares);
    EXPECT_TRUE(of_logprobs.within(bound)) << std::sqrt(of_logprobs.squares) << " of " << std::sqrt(of_logprobs.norm);
    EXPECT_TRUE(of_entropies.within(bound)) << std::sqrt(of_entropies.squares);
    EXPECT_NEAR(loss, c.at("loss").get<double>(), bound * std::max(1.0, std::sqrt(of_logprobs.norm)));
  }
}

TEST(StreamingObjective, AgreesWithPublishedValues) {
  const json& policy = test::objective_golden().at("published").at("policy_loss");
  const auto advantages = policy.at("advantages").get<std::vector<double>>();
  const auto logprobs = policy.at("logprobs").get<std::vector<double>>(),
             old_logprobs = policy.at("old_logprobs").get<std::vector<double>>();
  ObjectiveConfig config;
  config.epsilon = policy.at("epsilon");
  double mean = 0.0;
  for (size_t t = 0; t < advantages.size(); ++t) {
    mean += of_one_token(one_token(advantages[t], old_logprobs[t]), config, logprobs[t]).policy / double(advantages.size());
  }
  EXPECT_NEAR(mean, policy.at("token_mean_loss").get<double>(), 0.5e-4);  // printed with four digits

  const json& dual = test::objective_golden().at("published").at("dual_clip");
  config.epsilon = dual.at("epsilon");
  config.clip_ratio_c = dual.at("clip_ratio_c").get<double>();
  for (size_t t = 0; t < 3; ++t) {
    const double advantage = dual.at("advantages")[t], ratio = dual.at("ratios")[t];
    const double loss = of_one_token(one_token(advantage, -1.0), config, -1.0 + std::log(ratio)).policy;
    EXPECT_NEAR(loss, dual.at("losses")[t].get<double>(), 1e-14);
  }

  config.beta = 1.0;
  for (const double ref : {0.0, -15.0, -30.0}) {
    const std::map<double, std::array<double, 3>> published{
        {0.0, {-1, 0.5, 0.7183}}, {-15.0, {14, 98, 13}}, {-30.0, {29, 420.5, 28}}};
    for (const auto& [kind, index] :
         {std::pair{core::objective::Kl::kK1, 0}, {core::objective::Kl::kK2, 1}, {core::objective::Kl::kK3, 2}}) {
      config.kl = kind;
      EXPECT_NEAR(of_one_token(one_token(0.0, {}, ref), config, -1.0).kl, published.at(ref)[index], 0.5e-4);
    }
  }
}

TEST(StreamingObjective, DerivativesAreThoseOfTheLoss) {
  for (const auto kind : {core::objective::Kl::kK1, core::objective::Kl::kK2, core::objective::Kl::kK3}) {
    for (const double advantage : {-2.0, 1.5}) {
      for (const double logprob : {-0.2, -0.7, -1.0, -1.05, -1.9}) {  // ratios 2.2 … 0.4: clipped both ways, and not
        ObjectiveConfig config;
        config.beta = 0.4;
        config.kl = kind;
        config.epsilon_high = 0.3;
        config.delta = 1.9;
        const Batch batch = one_token(advantage, -1.0, -1.3);
        const auto loss = [&](double lp) {
          const auto t = of_one_token(batch, config, lp);
          return t.policy + t.kl;
        };
        constexpr double kStep = 1e-6;
        const double numeric = (loss(logprob + kStep) - loss(logprob - kStep)) / (2 * kStep);
        EXPECT_NEAR(of_one_token(batch, config, logprob).derivative, numeric, 1e-8) << logprob << " A " << advantage;
      }
    }
  }
}

TEST(StreamingObjective, OnPolicyRatioIsOneAndItsGradientFlows) {
  const auto token = of_one_token(one_token(3.0, {}), {}, -4.2);
  EXPECT_EQ(token.policy, -3.0);
  EXPECT_EQ(token.derivative, -3.0);
}

TEST(StreamingObjective, KlTimesTheRatioPullsByTheLogRatioToTheReferenceWhereTheRatioIsOne) {
  const auto at = [](const ObjectiveConfig& config) { return of_one_token(one_token(0.0, {}, -2.5), config, -1.0); };
  ObjectiveConfig config{.beta = 1.0};
  const double k3 = std::exp(-1.5) + 0.5;
  EXPECT_DOUBLE_EQ(at(config).kl, k3);
  EXPECT_DOUBLE_EQ(at(config).derivative, 1.5);  // k3' + k3 = lp - lr: that of the reverse KL
  config.use_bias_correction_kl = false;
  EXPECT_DOUBLE_EQ(at(config).derivative, 1.0 - std::exp(-1.5));
  config = {.dialect = core::objective::Dialect::kVerl, .beta = 1.0};
  EXPECT_DOUBLE_EQ(at(config).derivative, 1.0 - std::exp(-1.5)) << "verl has the plain one";
  config.use_bias_correction_kl = true;
  EXPECT_DOUBLE_EQ(at(config).derivative, 1.5);
  config = {.beta = 1.0, .kl = core::objective::Kl::kK1};
  EXPECT_DOUBLE_EQ(at(config).derivative, 1.0) << "TRL has k3 alone";
}

TEST(StreamingObjective, KlTimesASharedRatioPullsAtEveryTokenByTheirMean) {
  Batch batch = one_token(0.0, {});
  batch[0].responses[0].completion_ids = {0, 0, 0};
  batch[0].responses[0].completion_mask = {1, 0, 1};
  batch[0].responses[0].ref_logprobs = {-1.0, -9.0, -3.0};
  const core::model::TokenScores scores{.logprobs = {{{-1.0, -1.0, -2.0}}}};  // kl 0, uncounted, and e^-1
  const ObjectiveConfig config{.loss_type = core::objective::LossType::kGspo, .beta = 1.0};
  ASSERT_TRUE(needs_scores(batch, config)) << "the ratio is 1, its gradient needs the other tokens' KL";
  const GrpoObjective objective(batch, config, 1.0, 3, scores);
  const double kl = std::exp(-1.0);
  EXPECT_DOUBLE_EQ(objective.token(0, 0, 0, -1.0, 0.0).derivative, 0.5 * (kl / 2));
  EXPECT_DOUBLE_EQ(objective.token(0, 0, 2, -2.0, 0.0).derivative, 0.5 * (1.0 - kl + kl / 2));
  EXPECT_EQ(objective.token(0, 0, 1, -1.0, 0.0).derivative, 0.0);
  EXPECT_THAT([&] { GrpoObjective(batch, config, 1.0, 3); },
              testing::ThrowsMessage<ConfigError>(testing::HasSubstr("scoring pass")));
}

Batch rewarded(const std::vector<std::optional<double>>& rewards) {
  Batch batch{{.prompt_id = "p", .prompt_ids = {0}}};
  for (const auto& reward : rewards) batch[0].responses.push_back({.completion_ids = {0}, .reward = reward});
  return batch;
}

TEST(StreamingObjective, EqualOrMissingRewardsGiveExactlyZeroAndNoGradient) {
  ObjectiveConfig config;
  config.advantage_epsilon = 0.0;
  const Batch batch = rewarded({0.1, 0.1, 0.1, std::nullopt});
  const GrpoObjective objective(batch, config, 1.0, 1);
  EXPECT_THAT(objective.advantages()[0], testing::Each(0.0));
  EXPECT_FALSE(objective.has_gradient(0, 0));
  EXPECT_EQ(objective.token(0, 0, 0, -1.0, 0.0).derivative, 0.0);
}

TEST(StreamingObjective, KlWithoutReferenceLogprobsIsRefused) {
  ObjectiveConfig config;
  config.beta = 0.1;
  const Batch batch = rewarded({1.0, 0.0});
  EXPECT_THROW(GrpoObjective(batch, config, 1.0, 1), ConfigError);
}

TEST(StreamingObjective, WhatCannotBeIsRefusedByItsKey) {
  const std::vector<std::pair<std::string, std::string>> refused{
      {"importance_sampling_level: sequence, loss_type: gmpo", "objective.importance_sampling_level"},
      {"importance_sampling_level: sequence, loss_type: rloo", "objective.importance_sampling_level"},
      {"importance_sampling_level: sequence, loss_type: reinforce", "objective.importance_sampling_level"},
      {"delta: 1.5, loss_type: cispo", "objective.delta"},
      {"delta: 1.5, loss_type: sapo", "objective.delta"},
      {"clip_ratio_c: 3, loss_type: gspo", "objective.clip_ratio_c"},
      {"clip_ratio_c: 3, importance_sampling_level: sequence", "objective.clip_ratio_c"},
      {"aggregation: token-mean, loss_type: gmpo", "objective.aggregation"},
      {"aggregation: seq-mean-token-sum, loss_type: rloo", "objective.aggregation"},
      {"top_entropy_quantile: 0.5, loss_type: rloo", "objective.top_entropy_quantile"},
      {"importance_sampling_correction: token_mask, loss_type: gmpo", "objective.importance_sampling_correction"},
      {"importance_sampling_correction: token_truncate, loss_type: rloo", "objective.importance_sampling_correction"},
      {"multi_objective_aggregation: normalize_then_sum, advantage_estimator: rloo", "objective.multi_objective_aggregation"},
      {"multi_objective_aggregation: normalize_then_sum, dialect: verl", "objective.multi_objective_aggregation"},
      {"multi_objective_aggregation: normalize_then_sum, beta: 0.1, kl_in: reward", "objective.multi_objective_aggregation"},
      {"use_bias_correction_kl: true, beta: 0.1, kl_in: reward", "objective.use_bias_correction_kl"},
      {"importance_sampling_min: 4", "objective.importance_sampling_min"},
  };
  const Batch batch = rewarded({1.0, 0.0});
  for (const auto& [text, key] : refused) {
    const auto config = core::config::load_text<ObjectiveConfig>("{" + text + "}", "test");
    EXPECT_THAT([&] { GrpoObjective(batch, config, 1.0, 1); }, testing::ThrowsMessage<ConfigError>(testing::HasSubstr(key + ": ")))
        << text;
  }
}

TEST(StreamingObjective, AsksForAScoringPassWhereItNeedsOneAndSaysSoWithoutIt) {
  Batch batch = rewarded({1.0, 0.0});
  ObjectiveConfig config;
  EXPECT_FALSE(needs_scores(batch, config));
  config.loss_type = core::objective::LossType::kGspo;
  EXPECT_FALSE(needs_scores(batch, config)) << "without old log-probs the ratio is 1";
  for (auto& response : batch[0].responses) response.old_logprobs = {-1.0};
  EXPECT_TRUE(needs_scores(batch, config));
  EXPECT_THAT([&] { GrpoObjective(batch, config, 1.0, 1); },
              testing::ThrowsMessage<ConfigError>(testing::HasSubstr("scoring pass")));
  config.loss_type = core::objective::LossType::kCispo;
  EXPECT_FALSE(needs_scores(batch, config));
  config.importance_sampling_level = core::objective::ImportanceSamplingLevel::kSequence;
  EXPECT_TRUE(needs_scores(batch, config));
  config = {.top_entropy_quantile = 0.5};
  EXPECT_TRUE(needs_scores(batch, config));
  config = {.beta = 0.1};
  EXPECT_FALSE(needs_scores(batch, config)) << "a KL times its own token's ratio";
  config = {.beta = 0.1, .kl_in = core::objective::KlPlace::kReward};
  EXPECT_FALSE(needs_scores(batch, config));
  batch[0].responses[0].old_logprobs.reset();
  EXPECT_TRUE(needs_scores(batch, config));
}

TEST(StreamingObjective, KlInTheRewardIsTakenOffBeforeTheGroupsMean) {
  Batch batch = rewarded({1.0, 1.0});
  batch[0].responses[0].ref_logprobs = {-2.0};
  batch[0].responses[1].ref_logprobs = {-1.0};
  const core::model::TokenScores scores{.logprobs = {{{-1.0}, {-1.0}}}};
  ObjectiveConfig config{.scale_rewards = core::objective::ScaleRewards::kNone, .beta = 0.5};
  config.kl_in = core::objective::KlPlace::kReward;
  const GrpoObjective objective(batch, config, 1.0, 1, scores);  // kl 1 and 0: rewards 0.5 and 1
  EXPECT_THAT(objective.advantages()[0], testing::ElementsAre(-0.25, 0.25));
  EXPECT_EQ(objective.token(0, 0, 0, -1.0, 0.0).kl, 0.0);
  // A mini-batch has the advantages of the whole generation: the term is in them.
  for (auto& response : batch[0].responses) response.advantage = 2.0, response.ref_logprobs.reset();
  EXPECT_FALSE(needs_scores(batch, config));
  EXPECT_THAT(GrpoObjective(batch, config, 1.0, 1).advantages()[0], testing::Each(2.0));
}

TEST(StreamingObjective, AGivenAdvantageTakesNoPartInTheStatisticsOfRewards) {
  Batch batch = rewarded({1.0, 0.0});
  batch.push_back(rewarded({100.0, -100.0})[0]);
  for (auto& response : batch[1].responses) response.advantage = 2.0;
  ObjectiveConfig config{.scale_rewards = core::objective::ScaleRewards::kBatch, .advantage_epsilon = 0.0};
  const GrpoObjective objective(batch, config, 1.0, 1);
  EXPECT_DOUBLE_EQ(objective.advantages()[0][0], std::sqrt(0.5));
  EXPECT_THAT(objective.advantages()[1], testing::Each(2.0));
}

TEST(StreamingObjective, WeightsOfRewardsMustMatchTheirNumber) {
  Batch batch = rewarded({1.0, 0.0});
  for (auto& response : batch[0].responses) response.reward_parts = {1.0, 2.0};
  ObjectiveConfig config;
  config.reward_weights = {1.0, 1.0, 1.0};
  EXPECT_THAT([&] { GrpoObjective(batch, config, 1.0, 1); },
              testing::ThrowsMessage<ConfigError>(testing::HasSubstr("objective.reward_weights has 3 weights")));
}

TEST(StreamingObjective, VerlsClampsOfK3EndItsPull) {
  ObjectiveConfig config{.dialect = core::objective::Dialect::kVerl, .beta = 1.0};
  const auto at = [&](double reference) { return of_one_token(one_token(0.0, {}, reference), config, -1.0); };
  EXPECT_DOUBLE_EQ(at(1.0).kl, std::exp(2.0) - 3.0);
  EXPECT_DOUBLE_EQ(at(1.0).derivative, 1.0 - std::exp(2.0));
  for (const double far : {2.0, 30.0, -13.0, -30.0}) {  // e^3 − 4, and beyond ±20
    EXPECT_EQ(at(far).kl, 10.0) << far;
    EXPECT_EQ(at(far).derivative, 0.0) << far;
  }
}

TEST(StreamingObjective, AResponseThatIsClippedWholeNeedsNoBackwardPass) {
  Batch batch = one_token(1.0, -1.0);
  ObjectiveConfig config{.loss_type = core::objective::LossType::kGspo};
  const auto gradient_at = [&](double logprob) {
    return GrpoObjective(batch, config, 1.0, 1, {.logprobs = {{{logprob}}}}).has_gradient(0, 0);
  };
  EXPECT_TRUE(gradient_at(-1.0));
  EXPECT_FALSE(gradient_at(-0.5));
  config.loss_type = core::objective::LossType::kGrpo;
  EXPECT_TRUE(gradient_at(-0.5)) << "a token's ratio is not known before its replay";
  batch[0].responses[0].sampling_logprobs = {-9.0};  // corrected away: e^8 is above the cap
  EXPECT_FALSE(gradient_at(-1.0));
}

}  // namespace
}  // namespace longstraw
