// The reference's objective against values that others computed: TRL's trainers, verl's functions and published unit tests.
#include "reference/objective.h"

#include "core/base/errors.h"
#include "core/config/enums.h"
#include "core/config/load.h"
#include "tests/support/closeness.h"
#include "tests/support/objective_golden.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <set>

namespace longstraw {
namespace {

using core::data::Batch;
using core::data::PromptGroup;
using core::data::Response;
using core::objective::ObjectiveConfig;
using core::objective::ScaleRewards;
using Rows = std::vector<std::vector<double>>;
using core::model::TokenScores;
using nlohmann::json;

using test::objective_golden;

struct LossAndGradient {
  double loss = 0.0;
  Rows gradient;
  Rows entropy_gradient;
};

std::vector<double> numbers(const at::Tensor& tensor) {
  const at::Tensor values = tensor.contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

LossAndGradient evaluate(const Batch& batch, const ObjectiveConfig& config, int64_t max_completion_length,
                         const TokenScores& scores) {
  const reference::BatchObjective objective(batch, config, max_completion_length, scores);
  LossAndGradient result;
  for (size_t prompt = 0; prompt < batch.size(); ++prompt) {
    for (size_t member = 0; member < batch[prompt].responses.size(); ++member) {
      const auto leaf = [&](const auto& rows) {
        return at::tensor(at::ArrayRef<double>(rows.at(prompt).at(member)), at::kDouble).set_requires_grad(true);
      };
      const at::Tensor lp = leaf(scores.logprobs);
      const at::Tensor entropy = leaf(scores.entropies);
      const auto share = objective.share(prompt, member, lp, entropy);
      at::Tensor loss = share.policy;
      if (share.kl.defined()) loss = loss + share.kl;
      if (share.entropy.defined()) loss = loss + share.entropy;
      result.loss += loss.item<double>();
      const auto gradients = torch::autograd::grad({loss}, {lp, entropy}, {}, std::nullopt, false, /*allow_unused=*/true);
      result.gradient.push_back(numbers(gradients[0]));
      result.entropy_gradient.push_back(numbers(gradients[1].defined() ? gradients[1] : at::zeros_like(entropy)));
    }
  }
  return result;
}

LossAndGradient evaluate(const Batch& batch, const ObjectiveConfig& config, int64_t max_completion_length, const Rows& logprobs) {
  TokenScores scores;
  size_t row = 0;
  for (const auto& group : batch) {
    scores.logprobs.emplace_back();
    scores.entropies.emplace_back();
    for (size_t member = 0; member < group.responses.size(); ++member, ++row) {
      scores.logprobs.back().push_back(logprobs.at(row));
      scores.entropies.back().emplace_back(logprobs.at(row).size(), 0.0);
    }
  }
  return evaluate(batch, config, max_completion_length, scores);
}

std::vector<double> flat(const Rows& rows) {
  std::vector<double> all;
  for (const auto& row : rows) all.insert(all.end(), row.begin(), row.end());
  return all;
}

at::Tensor as_tensor(const std::vector<double>& values) { return at::tensor(at::ArrayRef<double>(values), at::kDouble); }

double distance(const Rows& got, const json& wanted) {
  return test::relative_l2(as_tensor(flat(got)), as_tensor(flat(wanted.get<Rows>())));
}

TEST(ReferenceObjective, AgreesWithTrlAndVerlOnEveryGoldenCase) {
  std::set<core::objective::LossType> seen;
  for (const json& c : test::objective_cases()) {
    SCOPED_TRACE(c.at("name").get<std::string>());
    const Batch batch = test::objective_batch(c);
    const ObjectiveConfig config = test::objective_config(c.at("objective"));
    seen.insert(config.loss_type);
    const auto scores = test::objective_scores(c);
    const auto got = evaluate(batch, config, c.at("max_completion_length"), scores);
    const double bound = c.at("bound");  // derived in fixtures/objective_cases.py and in the maker of the file
    EXPECT_LE(distance(reference::advantages(batch, config, scores), json::array({c.at("advantages")})), bound);
    const double magnitude = as_tensor(flat(c.at("grad_logprobs").get<Rows>())).norm().item<double>();
    EXPECT_NEAR(got.loss, c.at("loss").get<double>(), bound * std::max(magnitude, 1.0));
    EXPECT_LE(distance(got.gradient, c.at("grad_logprobs")), bound);
    if (!c.at("grad_entropies").is_null()) {
      EXPECT_LE(distance(got.entropy_gradient, c.at("grad_entropies")), bound);
    }
  }
  EXPECT_EQ(seen.size(), names_of(core::objective::LossType{}).size()) << "a loss type without a golden case";
}

Batch one_response(const std::vector<double>& old_logprobs, double advantage) {
  Response response;
  response.completion_ids.assign(old_logprobs.size(), 0);
  response.old_logprobs = old_logprobs;
  response.advantage = advantage;
  return {{.prompt_id = "p", .prompt_ids = {0}, .responses = {response}}};
}

TEST(ReferenceObjective, AgreesWithThePublishedClippedLoss) {
  const json& published = objective_golden().at("published").at("policy_loss");
  const auto advantages = published.at("advantages").get<std::vector<double>>();
  const auto old_logprobs = published.at("old_logprobs").get<std::vector<double>>();
  const auto logprobs = published.at("logprobs").get<std::vector<double>>();
  ObjectiveConfig config;
  config.epsilon = published.at("epsilon");
  double mean = 0.0;  // the published advantages differ by token: one response of a token each
  for (size_t t = 0; t < advantages.size(); ++t) {
    mean +=
        evaluate(one_response({old_logprobs[t]}, advantages[t]), config, 1, Rows{{logprobs[t]}}).loss / double(advantages.size());
  }
  EXPECT_NEAR(mean, published.at("token_mean_loss").get<double>(), 0.5e-4);  // printed with four digits
}

TEST(ReferenceObjective, AgreesWithThePublishedKlEstimators) {
  const json& published = objective_golden().at("published").at("kl");
  for (const auto kind : {core::objective::Kl::kK1, core::objective::Kl::kK2, core::objective::Kl::kK3}) {
    const auto wanted = published.at(std::string(core::config::name_of(kind))).get<std::vector<double>>();
    for (size_t i = 0; i < wanted.size(); ++i) {
      Batch batch = one_response({published.at("logprob").get<double>()}, 0.0);
      batch[0].responses[0].ref_logprobs = {published.at("ref_logprobs")[i].get<double>()};
      ObjectiveConfig config;
      config.beta = 1.0;
      config.kl = kind;
      EXPECT_NEAR(evaluate(batch, config, 1, Rows{{published.at("logprob").get<double>()}}).loss, wanted[i], 0.5e-4);
    }
  }
}

TEST(ReferenceObjective, AgreesWithThePublishedDualClip) {
  const json& published = objective_golden().at("published").at("dual_clip");
  ObjectiveConfig config;
  config.epsilon = published.at("epsilon");
  config.clip_ratio_c = published.at("clip_ratio_c").get<double>();
  for (size_t i = 0; i < published.at("ratios").size(); ++i) {
    const double log_ratio = std::log(published.at("ratios")[i].get<double>());
    const double loss = evaluate(one_response({0.0}, published.at("advantages")[i]), config, 1, Rows{{log_ratio}}).loss;
    // exp(log r) and its product with A: some roundings of a number of a few units.
    EXPECT_NEAR(loss, published.at("losses")[i].get<double>(), 1e-15 * 8);
  }
}

TEST(ReferenceObjective, TheRatioIsCappedBeforeItIsClipped) {
  ObjectiveConfig config;
  config.delta = 1.5;
  EXPECT_DOUBLE_EQ(evaluate(one_response({0.0}, -2.0), config, 1, Rows{{std::log(2.0)}}).loss, 3.0);
}

TEST(ReferenceObjective, OnPolicyRatioIsOneAndItsGradientFlows) {
  Batch batch = one_response({-1.0, -2.0}, 3.0);
  batch[0].responses[0].old_logprobs.reset();
  const auto got = evaluate(batch, {}, 2, Rows{{-1.0, -2.0}});
  EXPECT_DOUBLE_EQ(got.loss, -3.0);
  EXPECT_DOUBLE_EQ(got.gradient[0][0], -1.5);
  EXPECT_DOUBLE_EQ(got.gradient[0][1], -1.5);
}

Batch rewarded(const std::vector<std::optional<double>>& rewards) {
  Batch batch{{.prompt_id = "p", .prompt_ids = {0}, .responses = {}}};
  for (const auto& reward : rewards) {
    Response response;
    response.completion_ids = {0};
    response.reward = reward;
    batch[0].responses.push_back(response);
  }
  return batch;
}

TEST(ReferenceObjective, EqualRewardsGiveExactlyZero) {
  for (const auto scale : {ScaleRewards::kGroup, ScaleRewards::kBatch, ScaleRewards::kNone}) {
    ObjectiveConfig config;
    config.scale_rewards = scale;
    config.advantage_epsilon = 0.0;
    Batch batch = rewarded({0.1, 0.1, 0.1});  // their rounded mean is not 0.1
    batch.push_back(rewarded({1.0, 0.0})[0]);
    const auto got = reference::advantages(batch, config);
    EXPECT_EQ(got[0], std::vector<double>(3, 0.0));
    EXPECT_GT(got[1][0], 0.0);
    EXPECT_EQ(reference::advantages(rewarded({0.7}), config)[0][0], 0.0) << "a group of one";
  }
}

TEST(ReferenceObjective, AMissingRewardIsLeftOutAndAGivenAdvantageKept) {
  ObjectiveConfig config;
  config.scale_rewards = ScaleRewards::kNone;
  Batch batch = rewarded({1.0, std::nullopt, 3.0});
  EXPECT_EQ(reference::advantages(batch, config)[0], (std::vector<double>{-1.0, 0.0, 1.0}));
  batch[0].responses[1].advantage = 0.25;
  EXPECT_EQ(reference::advantages(batch, config)[0], (std::vector<double>{-1.0, 0.25, 1.0}));
  EXPECT_EQ(reference::advantages(rewarded({std::nullopt, std::nullopt}), config)[0], (std::vector<double>{0.0, 0.0}));
}

TEST(ReferenceObjective, AMaskedTokenCountsNowhereEvenIfItIsInfinite) {
  Batch batch = one_response({-1.0, -1.0}, 1.0);
  batch[0].responses[0].completion_mask = std::vector<uint8_t>{1, 0};
  const auto got = evaluate(batch, {}, 2, Rows{{-1.0, -INFINITY}});
  EXPECT_DOUBLE_EQ(got.loss, -1.0);
  EXPECT_EQ(got.gradient[0][1], 0.0);
}

TEST(ReferenceObjective, KlTimesTheRatioHasTheGradientOfTheReverseKlOnPolicy) {
  Batch batch = one_response({-1.0, -2.0}, 0.0);
  batch[0].responses[0].old_logprobs.reset();
  batch[0].responses[0].ref_logprobs = {-2.5, -1.5};
  ObjectiveConfig config;
  config.beta = 1.0;
  const auto pull = [&] { return evaluate(batch, config, 2, Rows{{-1.0, -2.0}}).gradient[0]; };
  // k3' + k3 = lp - lr; a rounding each of e^(lr - lp) and of the two sums that it is in.
  EXPECT_NEAR(pull()[0], 0.5 * 1.5, 4e-16);
  EXPECT_NEAR(pull()[1], 0.5 * -0.5, 4e-16);
  config.use_bias_correction_kl = false;
  EXPECT_DOUBLE_EQ(pull()[0], 0.5 * (1 - std::exp(-1.5)));
  config = {};
  config.beta = 1.0;
  config.dialect = core::objective::Dialect::kVerl;
  EXPECT_DOUBLE_EQ(pull()[0], 0.5 * (1 - std::exp(-1.5))) << "verl has the plain one";
}

TEST(ReferenceObjective, AMaskedTokenHasNoKlEvenIfItIsInfinite) {
  Batch batch = one_response({-1.0, -1.0}, 0.0);
  batch[0].responses[0].completion_mask = std::vector<uint8_t>{1, 0};
  batch[0].responses[0].ref_logprobs = {-2.0, -1.0};
  ObjectiveConfig config;
  config.beta = 1.0;
  const auto got = evaluate(batch, config, 2, Rows{{-1.0, -INFINITY}});
  EXPECT_DOUBLE_EQ(got.loss, std::exp(-1.0));
  EXPECT_EQ(got.gradient[0][1], 0.0);
}

TEST(ReferenceObjective, KlWithoutReferenceLogprobsIsRefused) {
  ObjectiveConfig config;
  config.beta = 0.1;
  const Batch batch = one_response({-1.0}, 1.0);
  EXPECT_THROW(reference::BatchObjective(batch, config, 1), ConfigError);
}

TEST(ReferenceObjective, RefusesWhatHasNoDefinition) {
  Batch batch = rewarded({1.0, 0.0});
  const auto refuses = [&](const char* objective) {
    const auto config = core::config::load_text<ObjectiveConfig>(objective, "objective");
    EXPECT_THROW(reference::BatchObjective(batch, config, 1), ConfigError) << objective;
  };
  refuses("{kl_in: reward, beta: 0.1}");
  refuses("{top_entropy_quantile: 0.5}");
  refuses("{loss_type: gmpo, importance_sampling_correction: token_mask}");
  refuses("{multi_objective_aggregation: normalize_then_sum, advantage_estimator: rloo}");
  refuses("{multi_objective_aggregation: normalize_then_sum, kl_in: reward, beta: 0.1}");
  for (auto& response : batch[0].responses) response.reward_parts = {1.0, 2.0};
  refuses("{reward_weights: [1.0]}");
  batch[0].responses[1].reward_parts = {1.0};
  refuses("{multi_objective_aggregation: normalize_then_sum}");
}

TEST(ReferenceObjective, EqualPartsGiveExactlyZeroAndSoDoesARewardBesideAGivenAdvantage) {
  ObjectiveConfig config;
  config.multi_objective_aggregation = core::objective::RewardAggregation::kNormalizeThenSum;
  Batch batch = rewarded({0.1, 0.1, 0.1});
  for (auto& response : batch[0].responses) response.reward_parts = {0.1, std::nullopt};
  batch.push_back(rewarded({1.0, 0.0})[0]);
  for (auto& response : batch[1].responses) response.reward_parts = {*response.reward, 0.25};
  const auto got = reference::advantages(batch, config);
  EXPECT_EQ(got[0], std::vector<double>(3, 0.0));
  EXPECT_GT(got[1][0], 0.0);

  config = {};
  config.scale_rewards = ScaleRewards::kBatch;
  batch = rewarded({1.0, 0.0});
  const auto alone = reference::advantages(batch, config)[0];
  batch.push_back(rewarded({100.0, -100.0})[0]);
  for (auto& response : batch[1].responses) response.advantage = 0.5;
  EXPECT_EQ(reference::advantages(batch, config)[0], alone) << "a reward that decides nothing decided";
}

}  // namespace
}  // namespace longstraw
