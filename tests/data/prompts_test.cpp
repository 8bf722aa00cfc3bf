#include "core/data/prompts.h"
#include "tests/data/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace longstraw::core::data {
namespace {

using testing::HasSubstr;
using testing_support::message_of;
using testing_support::Scratch;

class Prompts : public testing::Test {
 protected:
  std::vector<PromptRow> read(const std::string& content) { return read_prompts(scratch_.file("p.jsonl", content)); }
  std::string refused(const std::string& content) {
    return message_of<FormatError>([&] { read(content); });
  }
  Scratch scratch_;
};

TEST_F(Prompts, text_chat_and_token_ids_with_the_users_columns) {
  const auto rows = read(R"({"prompt_id": "a", "prompt": "What is 2 + 2?", "answer": "4"})"
                         "\n"
                         R"({"prompt": [{"role": "user", "content": "Hi"}], "answer": 5, "more": {"x": [1]}})"
                         "\n\n"
                         R"({"prompt_id": 9, "prompt_ids": [1, 2]})"
                         "\n");
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].prompt_id, "a");
  EXPECT_EQ(rows[0].prompt, "What is 2 + 2?");
  EXPECT_EQ(rows[0].columns, (nlohmann::json{{"answer", "4"}}));
  EXPECT_EQ(rows[1].prompt_id, "2");  // the line's number
  EXPECT_EQ(rows[1].prompt[0]["content"], "Hi");
  EXPECT_EQ(rows[1].columns["more"]["x"][0], 1);
  EXPECT_EQ(rows[2].prompt_id, "9");
  EXPECT_TRUE(rows[2].prompt.is_null());
  EXPECT_EQ(rows[2].prompt_ids, (std::vector<std::int64_t>{1, 2}));
}

TEST_F(Prompts, that_cannot_be_used_are_refused_with_their_place) {
  EXPECT_EQ(refused(""), "p.jsonl: is empty, wanted at least one line with a prompt");
  EXPECT_EQ(refused(R"({"prompt": ""})"), "p.jsonl:1: prompt: got \"\", wanted a text or a list of chat messages, not empty");
  EXPECT_THAT(refused(R"({"prompt": []})"), HasSubstr("prompt: got a list of 0"));
  EXPECT_THAT(refused(R"({"prompt": 3})"), HasSubstr("prompt: got 3"));
  EXPECT_EQ(refused(R"({"promt": "x"})"),
            "p.jsonl:1: prompt: is missing, wanted a text, a list of chat messages, or prompt_ids; did you mean prompt by promt?");
  EXPECT_EQ(refused(R"({"prompt": ["x"]})"), "p.jsonl:1: prompt[0]: got \"x\", wanted a chat message");
  EXPECT_THAT(refused(R"({"prompt": [{"role": "user"}]})"), HasSubstr("prompt[0]: has no content"));
  EXPECT_THAT(refused(R"({"prompt": [{"role": 1, "content": "x"}]})"), HasSubstr("prompt[0].role: got 1"));
  EXPECT_THAT(refused(R"({"prompt_ids": []})"), HasSubstr("prompt_ids: got a list of 0"));
  EXPECT_THAT(refused(R"({"prompt_ids": [-1]})"), HasSubstr("prompt_ids[0]: got -1"));
  EXPECT_EQ(refused("{\"prompt_id\": \"a\", \"prompt\": \"x\"}\n{\"prompt_id\": \"a\", \"prompt\": \"y\"}"),
            "p.jsonl:2: prompt_id: got \"a\", which line 1 has already");
  EXPECT_THAT(refused(R"({"prompt": "x", "completions": 1})"),
              HasSubstr("completions: is a name that reward functions are called with"));
  EXPECT_THAT(refused(R"({"prompt": "x", "weight": NaN})"), HasSubstr("weight: got NaN, which is not JSON"));
}

TEST_F(Prompts, of_parquet_need_preparing) {
  EXPECT_EQ(message_of<FormatError>([&] { read_prompts(scratch_.file("p.Parquet", "PAR1")); }),
            "p.Parquet: is Parquet, wanted JSONL: `longstraw prepare` makes it of the file");
}

}  // namespace
}  // namespace longstraw::core::data
