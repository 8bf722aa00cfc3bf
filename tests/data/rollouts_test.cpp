// Reading rollouts that are right, in every spelling the format allows.

#include "core/data/rollouts.h"
#include "tests/data/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace longstraw::core::data {
namespace {

using testing_support::Scratch;
using Ids = std::vector<std::int64_t>;
using Numbers = std::vector<double>;

class ReadRollouts : public testing::Test {
 protected:
  Batch read(const std::string& content) { return read_rollouts(scratch_.file("r.jsonl", content)); }
  Scratch scratch_;
};

TEST_F(ReadRollouts, every_column_of_a_line) {
  const Batch batch =
      read(R"({"prompt_id": "q", "prompt_ids": [1, 2, 3], "completion_ids": [4, 5], "reward": 0.5, "advantage": -1.5,)"
           R"( "old_logprobs": [-1, -2.5], "ref_logprobs": [-3, -4], "sampling_logprobs": [-5, -6], "completion_mask": [1, 0]})");
  ASSERT_EQ(batch.size(), 1u);
  EXPECT_EQ(batch[0].prompt_id, "q");
  EXPECT_EQ(batch[0].prompt_ids, (Ids{1, 2, 3}));
  ASSERT_EQ(batch[0].responses.size(), 1u);
  const Response& response = batch[0].responses[0];
  EXPECT_EQ(response.completion_ids, (Ids{4, 5}));
  EXPECT_EQ(response.reward, 0.5);
  EXPECT_EQ(response.advantage, -1.5);
  EXPECT_EQ(response.old_logprobs, (Numbers{-1, -2.5}));
  EXPECT_EQ(response.ref_logprobs, (Numbers{-3, -4}));
  EXPECT_EQ(response.sampling_logprobs, (Numbers{-5, -6}));
  EXPECT_EQ(response.completion_mask, (std::vector<std::uint8_t>{1, 0}));
}

TEST_F(ReadRollouts, what_is_optional_may_be_missing_or_null) {
  const Batch batch = read(
      R"({"prompt_id": "q", "prompt_ids": [1], "completion_ids": [4], "reward": 1})"
      "\n"
      R"({"prompt_id": "q", "prompt_ids": [1], "completion_ids": [5], "reward": null, "advantage": null, "old_logprobs": null, "completion_mask": null})");
  ASSERT_EQ(batch[0].responses.size(), 2u);
  EXPECT_EQ(batch[0].responses[0].reward, 1.0);
  EXPECT_EQ(batch[0].responses[1].reward, std::nullopt);
  EXPECT_EQ(batch[0].responses[1].advantage, std::nullopt);
  EXPECT_EQ(batch[0].responses[1].old_logprobs, std::nullopt);
  EXPECT_EQ(batch[0].responses[1].completion_mask, std::nullopt);
}

TEST_F(ReadRollouts, lines_of_a_prompt_need_not_be_adjacent) {
  const Batch batch = read(R"({"prompt_id": "b", "prompt_ids": [1, 2], "completion_ids": [10], "reward": 1})"
                           "\n"
                           R"({"prompt_id": "a", "prompt_ids": [3], "completion_ids": [20], "reward": 1})"
                           "\n\n   \r\n"
                           R"({"completion_ids": [11], "reward": 0, "prompt_ids": [1, 2], "prompt_id": "b"})"
                           "\r\n");
  ASSERT_EQ(batch.size(), 2u);
  EXPECT_EQ(batch[0].prompt_id, "b");
  ASSERT_EQ(batch[0].responses.size(), 2u);
  EXPECT_EQ(batch[0].responses[0].completion_ids, Ids{10});
  EXPECT_EQ(batch[0].responses[1].completion_ids, Ids{11});
  EXPECT_EQ(batch[1].prompt_ids, Ids{3});  // a prompt of one token is a prompt
}

TEST_F(ReadRollouts, a_line_may_hold_a_whole_group) {
  const Batch grouped = read(R"({"prompt_id": 7, "prompt_ids": [1, 2], "completion_ids": [[4], [5, 6]], "reward": [1, null],)"
                             R"( "old_logprobs": [[-1], [-2, -3]], "completion_mask": [null, [true, false]]})");
  const Batch single = read(
      R"({"prompt_id": "7", "prompt_ids": [1, 2], "completion_ids": [4], "reward": true, "old_logprobs": [-1]})"
      "\n"
      R"({"prompt_id": "7", "prompt_ids": [1, 2], "completion_ids": [5, 6], "old_logprobs": [-2, -3], "completion_mask": [1, 0]})");
  EXPECT_EQ(grouped, single);
}

TEST_F(ReadRollouts, parts_of_the_reward_by_function) {
  const Batch grouped = read(R"({"prompt_id": "q", "prompt_ids": [1], "completion_ids": [[4], [5]], "reward": [2.5, null],)"
                             R"( "reward_parts": [[0.5, 2], [null, null]]})");
  const Batch single =
      read(R"({"prompt_id": "q", "prompt_ids": [1], "completion_ids": [4], "reward": 2.5, "reward_parts": [0.5, 2.0]})"
           "\n"
           R"({"prompt_id": "q", "prompt_ids": [1], "completion_ids": [5], "reward_parts": [null, null]})");
  EXPECT_EQ(grouped, single);
  EXPECT_EQ(grouped[0].responses[0].reward_parts, (std::vector<std::optional<double>>{0.5, 2.0}));
  EXPECT_EQ(grouped[0].responses[1].reward_parts, (std::vector<std::optional<double>>{std::nullopt, std::nullopt}));
}

TEST_F(ReadRollouts, columns_of_the_users_own_are_ignored) {
  const Batch batch = read(
      R"({"prompt_id": "q", "prompt": "What?", "prompt_ids": [1], "completion": "That.", "completion_text": "That.", "completion_ids": [4],)"
      R"( "completion_length": 1, "reward": 1, "reward_notes": {"a": [1, {"b": null}]}, "step": 3, "answer": "4", "text": "é\u0000"})");
  EXPECT_EQ(batch[0].responses[0].reward, 1.0);
}

TEST_F(ReadRollouts, a_column_named_almost_like_one_that_is_there_is_the_users_own) {
  EXPECT_EQ(
      read(R"({"prompt_id": "q", "prompt_idx": 3, "prompt_ids": [1], "completion_ids": [4], "reward": 1, "rewards": [1]})").size(),
      1u);
}

TEST_F(ReadRollouts, ids_up_to_the_vocabulary_and_numbers_of_any_size_are_read_exactly) {
  const Batch batch = read_rollouts(
      scratch_.file(
          "r.jsonl",
          R"({"prompt_id": "q", "prompt_ids": [0, 99], "completion_ids": [99], "reward": 0.1, "old_logprobs": [-1e-320]})"),
      {.vocab_size = 100});
  EXPECT_EQ(batch[0].prompt_ids, (Ids{0, 99}));
  EXPECT_EQ(batch[0].responses[0].reward, 0.1);
  EXPECT_EQ(batch[0].responses[0].old_logprobs, Numbers{-1e-320});
  EXPECT_EQ(read(R"({"prompt_id": "q", "prompt_ids": [9223372036854775807], "completion_ids": [9], "reward": 1})")[0].prompt_ids,
            Ids{INT64_MAX});
}

TEST_F(ReadRollouts, the_example_file_is_read) {
  const Batch batch = read_rollouts("examples/rollouts.jsonl");
  EXPECT_EQ(batch.size(), 2u);
  for (const PromptGroup& group : batch) EXPECT_EQ(group.responses.size(), 4u);
}

TEST(DataSha256, depends_on_the_content_and_on_nothing_else) {
  const Scratch scratch;
  const auto hash = [&](const std::string& content) { return data_sha256(read_rollouts(scratch.file("r.jsonl", content))); };
  const std::string plain = hash(R"({"prompt_id": "q", "prompt_ids": [1, 2], "completion_ids": [4], "reward": 1})");
  // A published value: files without newer columns keep the hash that records of them have.
  EXPECT_EQ(plain, "91a6e163f37e6de85ad633b4ad5f28f0a232ef4883476f67445e5e1b0fe3e38c");
  EXPECT_EQ(
      plain,
      hash(R"({"completion_ids": [4], "reward": 1.0e0, "text": "x", "prompt_ids": [1,2], "prompt_id": "q", "advantage": null})"));
  EXPECT_EQ(plain, hash(R"({"completion_ids": [[4]], "reward": [1], "prompt_ids": [1,2], "prompt_id": "q"})"));
  for (const char* other : {
           R"({"prompt_id": "p", "prompt_ids": [1, 2], "completion_ids": [4], "reward": 1})",
           R"({"prompt_id": "q", "prompt_ids": [1], "completion_ids": [2, 4], "reward": 1})",
           R"({"prompt_id": "q", "prompt_ids": [1, 2], "completion_ids": [5], "reward": 1})",
           R"({"prompt_id": "q", "prompt_ids": [1, 2], "completion_ids": [4], "reward": 2})",
           R"({"prompt_id": "q", "prompt_ids": [1, 2], "completion_ids": [4], "advantage": 1})",
           R"({"prompt_id": "q", "prompt_ids": [1, 2], "completion_ids": [4], "reward": 1, "completion_mask": [1]})",
           R"({"prompt_id": "q", "prompt_ids": [1, 2], "completion_ids": [4], "reward": 1, "old_logprobs": [0]})",
           R"({"prompt_id": "q", "prompt_ids": [1, 2], "completion_ids": [4], "reward": 1, "ref_logprobs": [0]})",
           R"({"prompt_id": "q", "prompt_ids": [1, 2], "completion_ids": [4], "reward": 1, "reward_parts": [1]})",
       }) {
    EXPECT_NE(plain, hash(other)) << other;
  }
}

}  // namespace
}  // namespace longstraw::core::data
