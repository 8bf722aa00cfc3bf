// Figures by hand, from the definitions in TRL's GRPOTrainer.
#include "training/metrics.h"

#include <gtest/gtest.h>

#include <cmath>

namespace longstraw::training {
namespace {

using core::data::Batch;
using core::data::Response;
using core::objective::ObjectiveConfig;

// Two groups of two; the second has equal rewards, and a masked token that would be clipped.
struct Step {
  Batch batch{{"a", {1, 2}, {Response{.completion_ids = {3, 4}, .reward = 1.0}, Response{.completion_ids = {3}, .reward = 0.0}}},
              {"b", {1}, {Response{.completion_ids = {5, 6, 7}, .reward = 0.5}, Response{.completion_ids = {5}, .reward = 0.5}}}};
  core::model::StepGradient gradient;
  Step() {
    gradient.loss = 0.25;
    gradient.logprobs = {{{-1.0, -2.0}, {-1.0}}, {{-1.0, -1.0, -1.0}, {-3.0}}};
    gradient.advantages = {{1.0, -1.0}, {2.0, -2.0}};
    batch[1].responses[0].completion_mask = {1, 1, 0};
  }
  void set(std::optional<std::vector<double>> Response::*column, const std::vector<std::vector<double>>& values) {
    size_t next = 0;
    for (auto& group : batch) {
      for (auto& response : group.responses) response.*column = values.at(next++);
    }
  }
};

TEST(GenerationMetrics, LengthsAndRewards) {
  Step step;
  for (auto& group : step.batch) {
    for (auto& response : group.responses) response.reward_parts = {*response.reward, std::nullopt};
  }
  step.batch[0].responses[0].reward_parts[1] = 4.0;
  const Metrics metrics = generation_metrics(step.batch, {"graded", "formed"}, {{0, 0}, {1, 0}});
  EXPECT_DOUBLE_EQ(metrics.at("completions/mean_length"), 7.0 / 4);
  EXPECT_EQ(metrics.at("completions/min_length"), 1.0);
  EXPECT_EQ(metrics.at("completions/max_length"), 3.0);
  EXPECT_EQ(metrics.at("completions/clipped_ratio"), 0.25);
  EXPECT_DOUBLE_EQ(metrics.at("completions/mean_terminated_length"), 4.0 / 3);
  EXPECT_EQ(metrics.at("reward"), 0.5);
  EXPECT_DOUBLE_EQ(metrics.at("reward_std"), std::sqrt(0.5 / 3));
  EXPECT_EQ(metrics.at("frac_reward_zero_std"), 0.5);
  EXPECT_EQ(metrics.at("rewards/graded/mean"), 0.5);
  EXPECT_EQ(metrics.at("rewards/formed/mean"), 4.0);  // over those that have one
  EXPECT_FALSE(metrics.contains("sampling/importance_sampling_ratio/mean"));
}

TEST(GenerationMetrics, SamplerAgainstTrainerOverCountedTokens) {
  Step step;
  step.set(&Response::old_logprobs, {{-1.0, -1.0}, {-1.0}, {-1.0, -1.0, -1.0}, {-1.0}});
  step.set(&Response::sampling_logprobs, {{-1.0, -1.5}, {-1.0}, {-1.0, -1.0, -9.0}, {-0.5}});
  const Metrics metrics = generation_metrics(step.batch, {}, {{0, 0}, {0, 0}});
  EXPECT_DOUBLE_EQ(metrics.at("sampling/importance_sampling_ratio/max"), std::exp(0.5));
  EXPECT_DOUBLE_EQ(metrics.at("sampling/importance_sampling_ratio/min"), std::exp(-0.5));
  EXPECT_DOUBLE_EQ(metrics.at("sampling/importance_sampling_ratio/mean"), (std::exp(0.5) + std::exp(-0.5) + 4.0) / 6);
  EXPECT_DOUBLE_EQ(metrics.at("sampling/sampling_logp_difference/mean"), 1.0 / 6);
}

TEST(StepMetrics, ClippingCountsTheSideThatTheAdvantageIsOn) {
  Step step;
  // Ratios: e^1 and 1 with A = 1; e^-1 with A = -1; e^1, e^-1 and a masked e^9 with A = 2; e^1 with A = -2.
  step.set(&Response::old_logprobs, {{-2.0, -2.0}, {0.0}, {-2.0, 0.0, -10.0}, {-4.0}});
  const Metrics metrics = step_metrics(step.batch, step.gradient, ObjectiveConfig{});
  EXPECT_EQ(metrics.at("loss"), 0.25);
  EXPECT_DOUBLE_EQ(metrics.at("clip_ratio/high_mean"), 2.0 / 6);
  EXPECT_DOUBLE_EQ(metrics.at("clip_ratio/low_mean"), 1.0 / 6);
  EXPECT_DOUBLE_EQ(metrics.at("clip_ratio/region_mean"), 3.0 / 6);
  EXPECT_EQ(metrics.at("clip_ratio/high_max"), 0.5);
  EXPECT_EQ(metrics.at("clip_ratio/low_min"), 0.0);
  EXPECT_FALSE(metrics.contains("kl"));
  EXPECT_FALSE(metrics.contains("entropy"));
}

TEST(StepMetrics, EntropyIsAMeanOverCountedTokens) {
  Step step;
  step.gradient.entropies = {{{1.0, 2.0}, {3.0}}, {{1.0, 1.0, 100.0}, {4.0}}};
  EXPECT_DOUBLE_EQ(step_metrics(step.batch, step.gradient, ObjectiveConfig{}).at("entropy"), 12.0 / 6);
}

TEST(MetricsAverage, IsOverTheStepsThatHaveAFiniteValue) {
  MetricsAverage average;
  average.add({{"loss", 1.0}, {"kl", NAN}, {"num_tokens", 10.0}});
  average.add({{"loss", 2.0}, {"kl", 3.0}, {"num_tokens", 30.0}});
  const Metrics taken = average.take();
  EXPECT_EQ(taken.at("loss"), 1.5);
  EXPECT_EQ(taken.at("kl"), 3.0);
  EXPECT_EQ(taken.at("num_tokens"), 30.0);  // where it stands
  EXPECT_TRUE(average.take().empty());
}

}  // namespace
}  // namespace longstraw::training
