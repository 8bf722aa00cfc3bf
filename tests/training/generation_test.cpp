// What is done with a generation's responses before there is a loss.
#include "training/generation.h"

#include "core/base/errors.h"
#include "tests/support/fixture.h"

#include <gtest/gtest.h>

#include <cmath>

namespace longstraw::training {
namespace {

using core::data::Batch;

core::data::Response response(int64_t length, std::optional<double> reward) {
  core::data::Response made;
  made.completion_ids.assign(size_t(length), 3);
  made.reward = reward;
  made.reward_parts = {reward};
  return made;
}

// Groups that are prepared, one after another.
class GivenGroups final : public RolloutSource {
 public:
  explicit GivenGroups(Batch groups) : groups_(std::move(groups)) {}
  int64_t rows() const override { return int64_t(groups_.size()); }
  int64_t longest_prompt() const override { return 2; }
  std::string data_sha256() const override { return ""; }
  SampledGroups next(int64_t count, DataPosition& at, int64_t) override {
    SampledGroups given;
    for (int64_t n = 0; n < count; ++n) {
      auto& group = given.groups.emplace_back();
      group.group = groups_.at(size_t(at.taken++));
      for (const auto& one : group.group.responses) group.truncated.push_back(one.completion_ids.size() == 10);
    }
    return given;
  }

 private:
  Batch groups_;
};

class GenerationTest : public ::testing::Test {
 protected:
  Generation make(Batch groups, bool can_resample = true) {
    GivenGroups source(std::move(groups));
    const auto policy = make_policy(settings_, settings_.objective);
    return GenerationMaker{.settings = settings_,
                           .objective = settings_.objective,
                           .decoder = *decoder_,
                           .policy = *policy,
                           .source = source,
                           .reference_model = nullptr,
                           .can_resample = can_resample}
        .make(at_);
  }

  std::unique_ptr<core::model::Decoder> decoder_ = test::tiny_decoder(test::tiny_config(), c10::ScalarType::Double);
  Settings settings_ = [] {
    Settings settings;
    settings.rollout.max_completion_length = 10;
    return settings;
  }();
  DataPosition at_;
};

TEST_F(GenerationTest, LongResponsesArePunishedSoftly) {
  settings_.train.soft_punish_cache = 4;
  settings_.train.prompts_per_step = 1;
  const Generation made = make({{"a", {1, 2}, {response(6, 1.0), response(7, 1.0), response(10, 1.0), response(11, 1.0)}}});
  const std::vector<double> wanted{1.0, 0.75, 0.0, 0.0};  // DAPO: (L - c - |y|) / c between L - c and L, -1 beyond
  for (size_t m = 0; m < wanted.size(); ++m) {
    const auto& one = made.batch[0].responses[m];
    EXPECT_EQ(*one.reward, wanted[m]);
    ASSERT_EQ(one.reward_parts.size(), 2u);
    EXPECT_EQ(*one.reward_parts[0] + *one.reward_parts[1], wanted[m]);
  }
}

TEST_F(GenerationTest, AMissingRewardStaysMissing) {
  settings_.train.soft_punish_cache = 4;
  const Generation made = make({{"a", {1, 2}, {response(9, std::nullopt), response(3, 1.0), response(4, 0.0)}}});
  EXPECT_FALSE(made.batch[0].responses[0].reward);
  EXPECT_EQ(made.batch[0].responses[0].reward_parts, (std::vector<std::optional<double>>{std::nullopt, std::nullopt}));
  EXPECT_EQ(made.batch[0].responses[0].advantage, 0.0);
}

TEST_F(GenerationTest, TruncatedResponsesLoseTheirLossWhenAskedTo) {
  settings_.train.mask_truncated_completions = true;
  const Generation made = make({{"a", {1, 2}, {response(10, 1.0), response(3, 0.0)}}});
  EXPECT_EQ(made.batch[0].responses[0].completion_mask, std::vector<uint8_t>(10, 0));
  EXPECT_FALSE(made.batch[0].responses[1].completion_mask);
}

TEST_F(GenerationTest, GroupsOfEqualRewardsAreReplaced) {
  settings_.train.prompts_per_step = 2;
  settings_.train.dynamic_sampling_tries = 2;
  const auto equal = [](const char* id) { return core::data::PromptGroup{id, {1, 2}, {response(2, 1.0), response(3, 1.0)}}; };
  const auto unequal = [](const char* id) { return core::data::PromptGroup{id, {1, 2}, {response(2, 1.0), response(3, 0.0)}}; };
  const Generation made = make({equal("a"), unequal("b"), equal("c"), unequal("d"), unequal("e")});
  ASSERT_EQ(made.batch.size(), 2u);
  EXPECT_EQ(made.batch[0].prompt_id, "b");
  EXPECT_EQ(made.batch[1].prompt_id, "d");
  EXPECT_EQ(made.dropped_groups, 2);
  EXPECT_EQ(at_.taken, 4);
}

TEST_F(GenerationTest, TheLastTrysGroupsStay) {
  settings_.train.dynamic_sampling_tries = 1;
  const auto equal = [](const char* id) { return core::data::PromptGroup{id, {1, 2}, {response(2, 1.0), response(3, 1.0)}}; };
  const Generation made = make({equal("a"), equal("b"), equal("c")});
  EXPECT_EQ(made.batch[0].prompt_id, "b");
  EXPECT_EQ(made.dropped_groups, 1);
}

TEST_F(GenerationTest, OldLogProbsComeOnlyWhereTheRatioIsNotOne) {
  const Batch groups{{"a", {1, 2}, {response(2, 1.0), response(3, 0.0)}}};
  EXPECT_FALSE(make(groups).batch[0].responses[0].old_logprobs);
  at_ = {};
  settings_.train.num_iterations = 2;
  EXPECT_TRUE(make(groups).batch[0].responses[0].old_logprobs);
  at_ = {};
  settings_.train.num_iterations = 1;
  Batch from_a_server = groups;
  for (auto& one : from_a_server[0].responses) one.sampling_logprobs = std::vector<double>(one.completion_ids.size(), -1.0);
  EXPECT_TRUE(make(from_a_server).batch[0].responses[0].old_logprobs);
}

TEST(MiniBatch, CutsTheResponsesInOrderAndLeavesNoneOut) {
  const Batch batch{{"a", {1}, {response(1, 0.0), response(2, 0.0), response(3, 0.0)}},
                    {"b", {1}, {response(4, 0.0)}},
                    {"c", {1}, {response(5, 0.0), response(6, 0.0), response(7, 0.0)}}};
  for (int64_t parts = 1; parts <= 7; ++parts) {
    std::vector<size_t> lengths;
    for (int64_t n = 0; n < parts; ++n) {
      const MiniBatch part = mini_batch(batch, n, parts);
      ASSERT_EQ(part.groups.size(), part.batch.size());
      EXPECT_FALSE(part.batch.empty());
      for (size_t g = 0; g < part.batch.size(); ++g) {
        EXPECT_EQ(part.batch[g].prompt_id, batch[part.groups[g]].prompt_id);
        for (const auto& one : part.batch[g].responses) lengths.push_back(one.completion_ids.size());
      }
    }
    EXPECT_EQ(lengths, (std::vector<size_t>{1, 2, 3, 4, 5, 6, 7})) << parts << " parts";
  }
}

TEST(GenerationJson, ComesBackBitForBit) {
  Generation made;
  auto& group =
      made.batch.emplace_back(core::data::PromptGroup{"a", {1, 2, 3}, {response(2, 1.0 / 3.0), response(1, std::nullopt)}});
  group.responses[0].advantage = -0.1;
  group.responses[0].old_logprobs = {-1e-300, -0.30000000000000004};
  group.responses[0].ref_logprobs = {-5e-324, -1.7976931348623157e308};
  group.responses[0].sampling_logprobs = {-0.0, -1.0};
  group.responses[1].completion_mask = {0};
  made.truncated = {{1, 0}};
  made.steps_done = 3;
  const Generation back = generation_from_json(nlohmann::json::parse(to_json(made).dump()));
  EXPECT_EQ(back.batch, made.batch);
  EXPECT_TRUE(std::signbit((*back.batch[0].responses[0].sampling_logprobs)[0]));
  EXPECT_EQ(back.truncated, made.truncated);
  EXPECT_EQ(back.steps_done, made.steps_done);
  EXPECT_EQ(back.captured.size(), 1u);
}

}  // namespace
}  // namespace longstraw::training
