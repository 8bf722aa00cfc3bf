// Data sets in tokens, whatever the file (what python/longstraw/prepare.py refuses is tested in tests/python/test_prepare.py).

#include "core/data/prepared.h"
#include "tests/data/scratch.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

namespace longstraw::core::data {
namespace {

using testing::HasSubstr;
using testing_support::message_of;
using testing_support::Scratch;
using Ids = std::vector<std::int64_t>;

const std::string kModel = "tests/data/tokenizer";
const std::string kMixed = R"({"prompt": "what is two", "answer": 4}
{"prompt_id": "chat", "prompt": [{"role": "user", "content": "what is"}]}

{"prompt_ids": [7, 8]}
)";

// One process for all of them: it takes seconds to start.
class Prepared : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    python_ = std::make_unique<ScoringProcess>(ScoringOptions{.model = kModel, .echo_errors = false});
  }
  static void TearDownTestSuite() { python_.reset(); }
  void SetUp() override {
    try {
      python_->encode("what");
    } catch (const ConfigError& error) {
#ifdef LONGSTRAW_NEEDS_TRANSFORMERS
      FAIL() << error.what();
#else
      GTEST_SKIP() << error.what();
#endif
    }
  }
  void expect_mixed(const std::vector<PromptRow>& rows, const std::vector<std::string>& ids) {
    ASSERT_EQ(rows.size(), 3u);
    EXPECT_EQ(rows[0].prompt_ids, (Ids{1, 5, 6, 7}));
    EXPECT_EQ(rows[0].prompt, "what is two");
    EXPECT_EQ(rows[0].columns.at("answer"), 4);
    EXPECT_EQ(rows[1].prompt_ids, (Ids{3, 5, 6, 4}));
    EXPECT_EQ(rows[1].prompt[0]["content"], "what is");
    EXPECT_EQ(rows[2].prompt_ids, (Ids{7, 8}));
    EXPECT_TRUE(rows[2].prompt.is_null());
    for (std::size_t n = 0; n < 3; ++n) EXPECT_EQ(rows[n].prompt_id, ids[n]);
  }

  static std::unique_ptr<ScoringProcess> python_;
  Scratch scratch_;
};
std::unique_ptr<ScoringProcess> Prepared::python_;

TEST_F(Prepared, texts_chats_and_ids_of_a_jsonl_file) {
  expect_mixed(prepared_prompts(scratch_.file("p.jsonl", kMixed), kModel, python_.get()), {"1", "chat", "4"});
  EXPECT_EQ(python_->encode("four"), (Ids{1, 10}));  // the process goes on
}

TEST_F(Prepared, parquet_gives_its_rows_in_a_process_of_its_own_too) {
  const std::string script =
      "import sys, pyarrow.parquet as p, pyarrow as a; p.write_table(a.table({'prompt': ['what is', 'two'], 'n': [3, None]}), sys.argv[1])";
  const auto path = scratch_.path("P.PARQUET");
  const std::string command = fmt::format("'{}' -c \"{}\" '{}'", find_python().string(), script, path.string());
  ASSERT_EQ(std::system(command.c_str()), 0);
  const auto rows = prepared_prompts(path, kModel);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].prompt_ids, (Ids{1, 5, 6}));
  EXPECT_EQ(rows[0].columns.at("n"), 3);
  EXPECT_EQ(rows[1].prompt_id, "2");
  EXPECT_TRUE(rows[1].columns.at("n").is_null());
}

TEST_F(Prepared, what_cannot_be_used_is_an_input_error_with_its_place) {
  const auto refused = [&](const std::string& name, const std::string& content, const std::string& model) {
    const auto path = scratch_.file(name, content);
    return message_of<FormatError>([&] { prepared_prompts(path, model, python_.get()); });
  };
  EXPECT_THAT(refused("p.parquet", "rubbish", kModel), HasSubstr("p.parquet: is no usable Parquet file"));
  EXPECT_THAT(refused("p.jsonl", R"({"prompt": [{"role": "pirate", "content": "x"}]})", kModel),
              HasSubstr("p.jsonl:1: prompt: the chat template of"));
  EXPECT_THAT(refused("p.jsonl", R"({"prompt": "x"})", ""), HasSubstr("p.jsonl:1: prompt: is a text, and there is no checkpoint"));
  EXPECT_EQ(refused("p.jsonl", "", kModel), "p.jsonl: is empty, wanted at least one line with a prompt");
}

TEST(PreparedIds, need_no_python) {
  ::setenv("LONGSTRAW_PYTHON", "/no/such/python", 1);
  const Scratch scratch;
  EXPECT_EQ(prepared_prompts(scratch.file("p.jsonl", R"({"prompt_ids": [7, 8]})"), "").at(0).prompt_ids, (Ids{7, 8}));
  ::unsetenv("LONGSTRAW_PYTHON");
}

}  // namespace
}  // namespace longstraw::core::data
