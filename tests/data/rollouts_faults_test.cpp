// Rollouts that can't be used: each is refused with file, line, key and value.

#include "core/data/rollouts.h"
#include "tests/data/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace longstraw::core::data {
namespace {

using testing::HasSubstr;
using testing_support::message_of;
using testing_support::Scratch;

const std::string kGood = R"({"prompt_id": "q", "prompt_ids": [1, 2], "completion_ids": [3, 4], "reward": 1})";

class Refused : public testing::Test {
 protected:
  // After one good line, so that the bad one is line 2.
  std::string after_good(const std::string& line) { return refused(kGood + "\n" + line + "\n"); }
  std::string refused(const std::string& content) {
    return message_of<FormatError>([&] { read_rollouts(scratch_.file("r.jsonl", content), {.vocab_size = 100}); });
  }
  Scratch scratch_;
};

// A line with `columns` added to, or put in the place of, what every line needs.
std::string line(const std::string& columns, const std::string& completion = "[3, 4]", const std::string& prompt = "[1, 2]") {
  return R"({"prompt_id": "q", "prompt_ids": )" + prompt + R"(, "completion_ids": )" + completion +
         (columns.empty() ? "" : ", " + columns) + "}";
}

TEST_F(Refused, files_that_hold_no_rollouts) {
  EXPECT_EQ(message_of<FormatError>([&] { read_rollouts(scratch_.path("none.jsonl")); }),
            "none.jsonl: can't be read: No such file or directory");
  EXPECT_THAT(message_of<FormatError>([&] { read_rollouts(scratch_.path("")); }), HasSubstr("is a folder, wanted a JSONL file"));
  EXPECT_EQ(refused(""), "r.jsonl: is empty, wanted at least one line with a rollout");
  EXPECT_EQ(refused("\n \n\r\n"), "r.jsonl: is empty, wanted at least one line with a rollout");
}

TEST_F(Refused, lines_that_are_no_json_object) {
  EXPECT_THAT(after_good("hello"), HasSubstr("r.jsonl:2: not JSON at byte 1"));
  EXPECT_EQ(after_good("[1, 2]"), "r.jsonl:2: got a list of 2, wanted a JSON object");
  EXPECT_EQ(after_good("3"), "r.jsonl:2: got 3, wanted a JSON object");
  EXPECT_THAT(after_good(kGood + kGood), HasSubstr("r.jsonl:2: "));
  EXPECT_THAT(after_good(kGood.substr(0, 30)), HasSubstr("is the file cut off?"));
  EXPECT_THAT(after_good(std::string("\x00\xff\xfe\x01", 4)), HasSubstr("r.jsonl:2: not JSON"));
  EXPECT_THAT(after_good(std::string(300'000, '[')), HasSubstr("r.jsonl:2: "));
}

TEST_F(Refused, columns_that_are_missing_or_occur_twice) {
  EXPECT_EQ(after_good(R"({"prompt_ids": [1], "completion_ids": [2]})"), "r.jsonl:2: prompt_id: is missing");
  EXPECT_EQ(after_good(R"({"prompt_id": "q", "completion_ids": [2]})"), "r.jsonl:2: prompt_ids: is missing");
  EXPECT_EQ(after_good(R"({"prompt_id": "q", "prompt_ids": [2]})"), "r.jsonl:2: completion_ids: is missing");
  EXPECT_EQ(after_good(line(R"("reward": 1, "reward": 2)")), "r.jsonl:2: reward: the column occurs twice");
}

TEST_F(Refused, columns_that_are_misspelt) {
  EXPECT_EQ(after_good(line(R"("reward": 1, "old_logprob": [0, 0])")),
            "r.jsonl:2: old_logprob: unknown column; did you mean old_logprobs?");
  EXPECT_EQ(after_good(line(R"("rewards": 1)")), "r.jsonl:2: rewards: unknown column; did you mean reward?");
  EXPECT_EQ(after_good(line(R"("Advantage": 1)")), "r.jsonl:2: Advantage: unknown column; did you mean advantage?");
  EXPECT_EQ(after_good(line(R"("reward": 1, "ref_log_probs": [0, 0])")),
            "r.jsonl:2: ref_log_probs: unknown column; did you mean ref_logprobs?");
  EXPECT_EQ(after_good(line(R"("reward": 1, "old_per_token_logps": [0, 0])")),
            "r.jsonl:2: old_per_token_logps: unknown column; here it is called old_logprobs");
  EXPECT_EQ(after_good(R"({"prompt_id": "q", "prompt_ids": [1], "response_ids": [2]})"),
            "r.jsonl:2: response_ids: unknown column; here it is called completion_ids");
}

TEST_F(Refused, parts_of_rewards_that_are_no_numbers_or_not_one_for_each_function) {
  EXPECT_EQ(after_good(line(R"("reward": 1, "reward_parts": {"f": 1})")),
            "r.jsonl:2: reward_parts: got an object, wanted a list of numbers or nulls, one for each reward function");
  EXPECT_THAT(after_good(line(R"("reward": 1, "reward_parts": [])")), HasSubstr("reward_parts: got a list of 0, wanted"));
  EXPECT_EQ(after_good(line(R"("reward": 1, "reward_parts": [1, "x"])")),
            "r.jsonl:2: reward_parts[1]: got \"x\", wanted a finite number or null");
  EXPECT_EQ(after_good(line(R"("reward": 1, "reward_parts": [1, 2])")),
            "r.jsonl:1: reward_parts: responses to prompt_id \"q\" have 0 and 2 of them, wanted one for each reward function");
}

TEST_F(Refused, ids_that_are_no_token_ids) {
  EXPECT_EQ(after_good(line("", "[]")), "r.jsonl:2: completion_ids: is empty, wanted at least one token");
  EXPECT_EQ(after_good(line("", "[[1], []]")), "r.jsonl:2: completion_ids[1]: is empty, wanted at least one token");
  EXPECT_EQ(after_good(line("", "[3]", "[]")), "r.jsonl:2: prompt_ids: is empty, wanted at least one token");
  EXPECT_EQ(after_good(line("", "[3, -1]")),
            "r.jsonl:2: completion_ids[1]: got -1, wanted a token id from 0, below the vocabulary's 100");
  EXPECT_EQ(after_good(line("", "[100]")),
            "r.jsonl:2: completion_ids[0]: got 100, wanted a token id from 0, below the vocabulary's 100");
  EXPECT_EQ(after_good(line("", "[3]", "[1, 100]")),
            "r.jsonl:2: prompt_ids[1]: got 100, wanted a token id from 0, below the vocabulary's 100");
  EXPECT_THAT(after_good(line("", "[18446744073709551615]")), HasSubstr("completion_ids[0]: got 18446744073709551615"));
  EXPECT_THAT(after_good(line("", "[1.5]")), HasSubstr("completion_ids[0]: got 1.5, wanted a token id"));
  EXPECT_THAT(after_good(line("", "[1.0]")), HasSubstr("completion_ids[0]: got 1.0, wanted a token id"));
  EXPECT_THAT(after_good(line("", "[\"3\"]")), HasSubstr("completion_ids[0]: got \"3\", wanted a token id"));
  EXPECT_THAT(after_good(line("", "[true]")), HasSubstr("completion_ids[0]: got true"));
  EXPECT_THAT(after_good(line("", "[3, [4]]")), HasSubstr("completion_ids[1]: got a list of 1"));
  EXPECT_THAT(after_good(line("", "[[3], 4]")), HasSubstr("completion_ids[1]: got 4, wanted a list of token ids"));
  EXPECT_EQ(after_good(line("", "\"3 4\"")), "r.jsonl:2: completion_ids: got \"3 4\", wanted a list of token ids");
  EXPECT_THAT(after_good(R"({"prompt_id": null, "prompt_ids": [1], "completion_ids": [2]})"), HasSubstr("prompt_id: got null"));
  EXPECT_THAT(after_good(R"({"prompt_id": "", "prompt_ids": [1], "completion_ids": [2]})"), HasSubstr("prompt_id: got \"\""));
}

TEST_F(Refused, numbers_that_are_not_finite) {
  const std::string wanted = ", which is not JSON; wanted a finite number, or null where there is none";
  EXPECT_EQ(after_good(line(R"("reward": NaN)")), "r.jsonl:2: reward: got NaN" + wanted);
  EXPECT_EQ(after_good(line(R"("reward": Infinity)")), "r.jsonl:2: reward: got Infinity" + wanted);
  EXPECT_EQ(after_good(line(R"("reward": -Infinity)")), "r.jsonl:2: reward: got -Infinity" + wanted);
  EXPECT_EQ(after_good(line(R"("reward": 1, "old_logprobs": [-1.5, NaN])")), "r.jsonl:2: old_logprobs: got NaN" + wanted);
  EXPECT_EQ(after_good(line(R"("reward": 1, "ref_logprobs": [-Infinity, -1])")), "r.jsonl:2: ref_logprobs: got -Infinity" + wanted);
  EXPECT_THAT(after_good(line(R"("reward": 1e999)")), HasSubstr("r.jsonl:2: reward: "));
  EXPECT_THAT(after_good(line(R"("reward": "NaN")")), HasSubstr("reward: got \"NaN\", wanted a finite number or null"));
}

TEST_F(Refused, values_of_another_type_or_length) {
  EXPECT_THAT(after_good(line(R"("reward": [1])")), HasSubstr("reward: got a list of 1, wanted a finite number or null"));
  EXPECT_THAT(after_good(line(R"("advantage": {})")), HasSubstr("advantage: got an object"));
  for (const std::string column : {"old_logprobs", "ref_logprobs", "sampling_logprobs"}) {
    EXPECT_EQ(after_good(line("\"reward\": 1, \"" + column + "\": [-1]")),
              "r.jsonl:2: " + column + ": got a list of 1, wanted 2 log-probs: one for each token of the completion");
    EXPECT_THAT(after_good(line("\"reward\": 1, \"" + column + "\": [-1, null]")),
                HasSubstr(column + "[1]: got null, wanted a finite number"));
    EXPECT_THAT(after_good(line("\"reward\": 1, \"" + column + "\": -1")), HasSubstr(column + ": got -1, wanted 2 log-probs"));
  }
  EXPECT_THAT(after_good(line(R"("reward": 1, "completion_mask": [1, 0, 1])")),
              HasSubstr("completion_mask: got a list of 3, wanted 2 mask values"));
  EXPECT_THAT(after_good(line(R"("reward": 1, "completion_mask": [1, 2])")), HasSubstr("completion_mask[1]: got 2, wanted 0 or 1"));
  EXPECT_THAT(after_good(line(R"("reward": 1, "completion_mask": [0.5, 1])")),
              HasSubstr("completion_mask[0]: got 0.5, wanted 0 or 1"));
}

TEST_F(Refused, group_lines_whose_lists_disagree) {
  EXPECT_EQ(after_good(line(R"("reward": [1])", "[[3], [4]]")),
            "r.jsonl:2: reward: got a list of 1, wanted a list of 2: one for each of completion_ids");
  EXPECT_THAT(after_good(line(R"("reward": 1)", "[[3], [4]]")), HasSubstr("reward: got 1, wanted a list of 2"));
  EXPECT_THAT(after_good(line(R"("reward": [1, 0], "old_logprobs": [[-1], [-1, -2]])", "[[3], [4]]")),
              HasSubstr("old_logprobs[1]: got a list of 2, wanted 1 log-probs"));
}

TEST_F(Refused, one_prompt_id_with_two_prompts) {
  EXPECT_EQ(after_good(line("\"reward\": 1", "[3]", "[1, 7]")),
            "r.jsonl:2: prompt_ids[1]: got 7, but 2 in line 1 has the same prompt_id \"q\"");
  EXPECT_EQ(after_good(line("\"reward\": 1", "[3]", "[1]")),
            "r.jsonl:2: prompt_ids[1]: got the end, but 2 in line 1 has the same prompt_id \"q\"");
  EXPECT_THAT(after_good(line("\"reward\": 1", "[3]", "[1, 2, 3]")), HasSubstr("prompt_ids[2]: got 3, but the end in line 1"));
}

TEST_F(Refused, groups_without_what_a_gradient_needs) {
  EXPECT_EQ(refused(line("")), "r.jsonl:1: reward: no response to prompt_id \"q\" has a reward or an advantage");
  EXPECT_EQ(refused(line("\"reward\": null")), "r.jsonl:1: reward: no response to prompt_id \"q\" has a reward or an advantage");
  EXPECT_EQ(after_good(line("\"reward\": 1, \"advantage\": 1")),
            "r.jsonl:1: advantage: 1 of the 2 responses to prompt_id \"q\" have it, wanted all or none");
  EXPECT_THAT(after_good(line("\"reward\": 1, \"old_logprobs\": [-1, -1]")), HasSubstr("old_logprobs: 1 of the 2 responses"));
  EXPECT_EQ(refused(line("\"reward\": 1, \"completion_mask\": [0, 0]")),
            "r.jsonl:1: completion_mask: every token of every response to prompt_id \"q\" is masked");
  // One masked member among others is a legitimate way to leave it out.
  EXPECT_EQ(after_good(line("\"reward\": 1, \"completion_mask\": [0, 0]")), "(no error)");
}

}  // namespace
}  // namespace longstraw::core::data
