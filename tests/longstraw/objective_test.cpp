// The streaming objective against TRL's own values, published hand values, and its own finite differences.
#include "longstraw/objective.h"

#include "core/base/errors.h"
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

TEST(StreamingObjective, AgreesWithTrlOnEveryGoldenCase) {
  ASSERT_GT(test::objective_golden().at("cases").size(), 5u);
  for (const json& c : test::objective_golden().at("cases")) {
    SCOPED_TRACE(c.at("name").get<std::string>());
    const Batch batch = test::objective_batch(c);
    const GrpoObjective objective(batch, test::objective_config(c.at("objective")), 1.0, c.at("max_completion_length"));
    const auto logprobs = c.at("logprobs").get<Rows>(), wanted = c.at("grad_logprobs").get<Rows>();
    const auto advantages = c.at("advantages").get<std::vector<double>>();
    double loss = 0.0, difference = 0.0, norm = 0.0, size = 0.0;
    size_t row = 0;
    for (size_t p = 0; p < batch.size(); ++p) {
      for (size_t m = 0; m < batch[p].responses.size(); ++m, ++row) {
        EXPECT_NEAR(objective.advantages()[p][m], advantages[row], 1e-13 * (1.0 + std::abs(advantages[row])));
        for (size_t t = 0; t < logprobs[row].size(); ++t) {
          const TokenLoss token = objective.token(p, m, t, logprobs[row][t], 0.0);
          loss += token.policy + token.kl;
          size += std::abs(token.policy) + std::abs(token.kl);
          difference += std::pow(token.derivative - wanted[row][t], 2);
          norm += std::pow(wanted[row][t], 2);
        }
      }
    }
    EXPECT_NEAR(loss, c.at("loss").get<double>(), 1e-14 * (1.0 + size));
    EXPECT_LE(std::sqrt(difference), 1e-13 * std::sqrt(norm));
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

}  // namespace
}  // namespace longstraw
