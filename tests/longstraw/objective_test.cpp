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
        if (derivatives != 0.0) EXPECT_TRUE(objective.has_gradient(p, m));
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
