// The reference's objective against values that others computed: TRL's trainer and published unit tests.
#include "reference/objective.h"

#include "core/base/errors.h"
#include "core/config/enums.h"
#include "tests/support/closeness.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <fstream>

namespace longstraw {
namespace {

using core::data::Batch;
using core::data::PromptGroup;
using core::data::Response;
using core::objective::ObjectiveConfig;
using core::objective::ScaleRewards;
using Rows = std::vector<std::vector<double>>;
using nlohmann::json;

const json& golden() {
  static const json kGolden = json::parse(std::ifstream("fixtures/objective/trl.json"));
  return kGolden;
}

std::optional<double> optional_number(const json& value) {
  return value.is_null() ? std::nullopt : std::optional(value.get<double>());
}

ObjectiveConfig config_of(const json& j) {
  ObjectiveConfig config;
  config.loss_type = core::config::value_named<core::objective::LossType>(j.at("loss_type").get<std::string>()).value();
  config.scale_rewards = core::config::value_named<ScaleRewards>(j.at("scale_rewards").get<std::string>()).value();
  config.kl = core::config::value_named<core::objective::Kl>(j.at("kl").get<std::string>()).value();
  config.beta = j.at("beta");
  config.epsilon = j.at("epsilon");
  config.epsilon_high = optional_number(j.at("epsilon_high"));
  config.delta = optional_number(j.at("delta"));
  config.advantage_epsilon = j.at("advantage_epsilon");
  return config;
}

Batch batch_of(const json& c) {
  const auto mask = c.at("mask").get<std::vector<std::vector<uint8_t>>>();
  const size_t group_size = c.at("group_size");
  Batch batch;
  for (size_t i = 0; i < mask.size(); ++i) {
    if (i % group_size == 0) batch.push_back({.prompt_id = "p" + std::to_string(batch.size()), .prompt_ids = {0}, .responses = {}});
    Response response;
    response.completion_ids.assign(mask[i].size(), 0);
    response.completion_mask = mask[i];
    if (!c.at("rewards").is_null()) response.reward = optional_number(c.at("rewards")[i]);
    if (!c.at("old_logprobs").is_null()) response.old_logprobs = c["old_logprobs"][i].get<std::vector<double>>();
    if (!c.at("ref_logprobs").is_null()) response.ref_logprobs = c["ref_logprobs"][i].get<std::vector<double>>();
    batch.back().responses.push_back(std::move(response));
  }
  return batch;
}

struct LossAndGradient {
  double loss = 0.0;
  Rows gradient;
};

LossAndGradient evaluate(const Batch& batch, const ObjectiveConfig& config, int64_t max_completion_length, const Rows& logprobs) {
  const reference::BatchObjective objective(batch, config, max_completion_length);
  LossAndGradient result;
  size_t row = 0;
  for (size_t prompt = 0; prompt < batch.size(); ++prompt) {
    for (size_t member = 0; member < batch[prompt].responses.size(); ++member, ++row) {
      const at::Tensor lp = at::tensor(at::ArrayRef<double>(logprobs[row]), at::kDouble).set_requires_grad(true);
      const auto share = objective.share(prompt, member, lp);
      const at::Tensor loss = share.kl.defined() ? share.policy + share.kl : share.policy;
      result.loss += loss.item<double>();
      const at::Tensor gradient = torch::autograd::grad({loss}, {lp})[0];
      result.gradient.emplace_back(gradient.data_ptr<double>(), gradient.data_ptr<double>() + gradient.numel());
    }
  }
  return result;
}

std::vector<double> flat(const Rows& rows) {
  std::vector<double> all;
  for (const auto& row : rows) all.insert(all.end(), row.begin(), row.end());
  return all;
}

at::Tensor as_tensor(const std::vector<double>& values) { return at::tensor(at::ArrayRef<double>(values), at::kDouble); }

TEST(ReferenceObjective, AgreesWithTrlOnEveryGoldenCase) {
  ASSERT_GT(golden().at("cases").size(), 5u);
  for (const json& c : golden().at("cases")) {
    SCOPED_TRACE(c.at("name").get<std::string>());
    const Batch batch = batch_of(c);
    const ObjectiveConfig config = config_of(c.at("objective"));
    const auto got = evaluate(batch, config, c.at("max_completion_length"), c.at("logprobs").get<Rows>());
    // Both sides in float64 over at most some hundred terms: sqrt(hundred) roundings of 1.1e-16, times the cancellation
    // in (r - mean) and between the terms of the loss.
    constexpr double kBound = 1e-13;
    EXPECT_LE(test::relative_l2(as_tensor(flat(reference::advantages(batch, config))),
                                as_tensor(c.at("advantages").get<std::vector<double>>())),
              kBound);
    const double magnitude = as_tensor(flat(c.at("grad_logprobs").get<Rows>())).norm().item<double>();
    EXPECT_NEAR(got.loss, c.at("loss").get<double>(), kBound * std::max(magnitude, 1.0));
    EXPECT_LE(test::relative_l2(as_tensor(flat(got.gradient)), as_tensor(flat(c.at("grad_logprobs").get<Rows>()))), kBound);
  }
}

Batch one_response(const std::vector<double>& old_logprobs, double advantage) {
  Response response;
  response.completion_ids.assign(old_logprobs.size(), 0);
  response.old_logprobs = old_logprobs;
  response.advantage = advantage;
  return {{.prompt_id = "p", .prompt_ids = {0}, .responses = {response}}};
}

TEST(ReferenceObjective, AgreesWithThePublishedClippedLoss) {
  const json& published = golden().at("published").at("policy_loss");
  const auto advantages = published.at("advantages").get<std::vector<double>>();
  const auto old_logprobs = published.at("old_logprobs").get<std::vector<double>>();
  const auto logprobs = published.at("logprobs").get<std::vector<double>>();
  ObjectiveConfig config;
  config.epsilon = published.at("epsilon");
  double mean = 0.0;  // the published advantages differ by token: one response of a token each
  for (size_t t = 0; t < advantages.size(); ++t) {
    mean += evaluate(one_response({old_logprobs[t]}, advantages[t]), config, 1, {{logprobs[t]}}).loss / double(advantages.size());
  }
  EXPECT_NEAR(mean, published.at("token_mean_loss").get<double>(), 0.5e-4);  // printed with four digits
}

TEST(ReferenceObjective, AgreesWithThePublishedKlEstimators) {
  const json& published = golden().at("published").at("kl");
  for (const auto kind : {core::objective::Kl::kK1, core::objective::Kl::kK2, core::objective::Kl::kK3}) {
    const auto wanted = published.at(std::string(core::config::name_of(kind))).get<std::vector<double>>();
    for (size_t i = 0; i < wanted.size(); ++i) {
      Batch batch = one_response({published.at("logprob").get<double>()}, 0.0);
      batch[0].responses[0].ref_logprobs = {published.at("ref_logprobs")[i].get<double>()};
      ObjectiveConfig config;
      config.beta = 1.0;
      config.kl = kind;
      EXPECT_NEAR(evaluate(batch, config, 1, {{published.at("logprob").get<double>()}}).loss, wanted[i], 0.5e-4);
    }
  }
}

// slime's dual clip example up to where the families part: capped and clipped ratios of both signs.
TEST(ReferenceObjective, ClipsOnTheSideThatTheAdvantagePoints) {
  ObjectiveConfig config;
  const auto loss = [&](double ratio, double advantage) {
    return evaluate(one_response({0.0}, advantage), config, 1, {{std::log(ratio)}}).loss;
  };
  EXPECT_DOUBLE_EQ(loss(2.0, 2.0), -2.4);
  EXPECT_NEAR(loss(2.0, -2.0), 4.0, 1e-15 * 8);  // exp(log 2): a rounding of each
  EXPECT_NEAR(loss(0.5, 2.0), -1.0, 1e-15 * 2);
  config.delta = 1.5;
  EXPECT_DOUBLE_EQ(loss(2.0, -2.0), 3.0);
}

TEST(ReferenceObjective, OnPolicyRatioIsOneAndItsGradientFlows) {
  Batch batch = one_response({-1.0, -2.0}, 3.0);
  batch[0].responses[0].old_logprobs.reset();
  const auto got = evaluate(batch, {}, 2, {{-1.0, -2.0}});
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
  const auto got = evaluate(batch, {}, 2, {{-1.0, -INFINITY}});
  EXPECT_DOUBLE_EQ(got.loss, -1.0);
  EXPECT_EQ(got.gradient[0][1], 0.0);
}

TEST(ReferenceObjective, KlWithoutReferenceLogprobsIsRefused) {
  ObjectiveConfig config;
  config.beta = 0.1;
  const Batch batch = one_response({-1.0}, 1.0);
  EXPECT_THROW(reference::BatchObjective(batch, config, 1), ConfigError);
}

}  // namespace
}  // namespace longstraw
