// Tokenizing and decoding with a checkpoint's own tokenizer (tests/data/tokenizer, made by make_tokenizer.py).

#include "core/data/reward_process.h"
#include "tests/data/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

namespace longstraw::core::data {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::message_of;
using testing_support::Scratch;

// One process for all of them: it takes seconds to start.
class Tokenizing : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    scoring_ = std::make_unique<ScoringProcess>(ScoringOptions{.model = "tests/data/tokenizer", .echo_errors = false});
  }
  static void TearDownTestSuite() { scoring_.reset(); }

  void SetUp() override {
    try {
      scoring_->encode("what");
    } catch (const ConfigError& error) {
#ifdef LONGSTRAW_NEEDS_TRANSFORMERS
      FAIL() << error.what();
#else
      GTEST_SKIP() << error.what();
#endif
    }
  }
  static std::unique_ptr<ScoringProcess> scoring_;
};
std::unique_ptr<ScoringProcess> Tokenizing::scoring_;

TEST_F(Tokenizing, text_gets_the_tokenizers_special_tokens) {
  EXPECT_THAT(scoring_->encode("what is two"), ElementsAre(1, 5, 6, 7));
}

TEST_F(Tokenizing, chat_goes_through_the_template_and_ends_with_the_generation_prompt) {
  EXPECT_THAT(scoring_->encode(json::parse(R"([{"role": "user", "content": "what is"}])")), ElementsAre(3, 5, 6, 4));
}

TEST_F(Tokenizing, decoding_leaves_special_tokens_out_unless_told_otherwise) {
  EXPECT_THAT(scoring_->decode({{1, 5, 6, 2}, {10, 2}}), ElementsAre("what is", "four"));
  EXPECT_THAT(scoring_->decode({{1, 5, 6, 2}}, false), ElementsAre("<s> what is </s>"));
  EXPECT_TRUE(scoring_->decode({}).empty());
}

TEST_F(Tokenizing, a_prompt_that_the_template_refuses_is_an_input_error_and_the_process_goes_on) {
  EXPECT_THAT(message_of<FormatError>([&] { scoring_->encode(json::parse(R"([{"role": "pirate", "content": "four"}])")); }),
              AllOf(HasSubstr("the chat template of"), HasSubstr("no such role: pirate")));
  EXPECT_THAT(scoring_->encode("four"), ElementsAre(1, 10));
}

TEST_F(Tokenizing, a_folder_without_a_tokenizer_is_an_input_error) {
  const Scratch scratch;
  ScoringProcess scoring({.model = scratch.path(""), .echo_errors = false});
  EXPECT_THAT(message_of<FormatError>([&] { scoring.encode("x"); }), HasSubstr("its tokenizer can't be loaded"));
}

}  // namespace
}  // namespace longstraw::core::data
