#include "core/data/describe.h"
#include "tests/data/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace longstraw::core::data {
namespace {

using testing_support::message_of;
using testing_support::Scratch;

TEST(Describe, counts_what_a_rollouts_file_holds) {
  const Scratch scratch;
  const auto path = scratch.file(
      "r.jsonl",
      R"({"prompt_id": "a", "prompt_ids": [1, 2, 3], "completion_ids": [[4], [90, 6]], "reward": [1, 3], "old_logprobs": [[-1], [-2, -3]]})"
      "\n"
      R"({"prompt_id": "b", "prompt_ids": [7], "completion_ids": [8, 9, 10], "reward": 2, "text": "x"})"
      "\n"
      R"({"prompt_id": "a", "prompt_ids": [1, 2, 3], "completion_ids": [5]})");
  EXPECT_EQ(describe_rollouts(path), nlohmann::json::parse(R"({
    "format": "longstraw-rollouts", "file": ")" + path.string() +
                                                           R"(", "lines": 3, "prompts": 2, "responses": 4,
    "group_size": {"min": 1, "max": 3},
    "prompt_tokens": {"min": 1, "max": 3, "total": 4},
    "response_tokens": {"min": 1, "max": 3, "total": 7},
    "largest_token_id": 90,
    "columns": {"reward": 3, "old_logprobs": 2},
    "other_columns": ["text"],
    "reward": {"count": 3, "mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0},
    "groups_of_equal_rewards": 1})"));
}

TEST(Describe, a_file_without_rewards_can_be_looked_at) {
  const Scratch scratch;
  const auto about = describe_rollouts(scratch.file("r.jsonl", R"({"prompt_id": "a", "prompt_ids": [1], "completion_ids": [4]})"));
  EXPECT_TRUE(about["reward"].is_null());
  EXPECT_EQ(about["groups_of_equal_rewards"], 0);
}

TEST(Describe, a_broken_line_is_named) {
  const Scratch scratch;
  EXPECT_EQ(message_of<FormatError>([&] { describe_rollouts(scratch.file("r.jsonl", "{\"prompt_id\": \"a\"}")); }),
            "r.jsonl:1: prompt_ids: is missing");
  EXPECT_EQ(message_of<FormatError>([&] { describe_rollouts(scratch.file("r.jsonl", "")); }),
            "r.jsonl: is empty, wanted at least one line with a rollout");
}

TEST(Describe, tells_prompts_from_rollouts) {
  const Scratch scratch;
  const auto prompts = scratch.file(
      "p.jsonl",
      "\n{\"prompt\": \"x\", \"answer\": 1}\n{\"prompt_ids\": [1]}\n{\"prompt\": [{\"role\": \"user\", \"content\": \"y\"}]}\n");
  const auto rollouts = scratch.file("r.jsonl", R"({"prompt_id": "a", "prompt_ids": [1], "completion_ids": [4]})");
  EXPECT_FALSE(is_rollouts_file(prompts));
  EXPECT_TRUE(is_rollouts_file(rollouts));
  EXPECT_EQ(describe_prompts(prompts),
            nlohmann::json::parse(R"({"format": "longstraw-prompts", "file": ")" + prompts.string() +
                                  R"(", "prompts": 3, "kinds": {"text": 1, "chat": 1, "token_ids": 1}, "columns": ["answer"]})"));
}

}  // namespace
}  // namespace longstraw::core::data
