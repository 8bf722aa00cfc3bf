// Several reward functions, Python and programs, that work, and that fail with the run stopped or going on.

#include "core/data/rewards.h"
#include "core/data/child_process.h"
#include "core/data/reward_process.h"
#include "tests/data/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>

namespace longstraw::core::data {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::message_of;

const std::string kPython = "tests/data/rewards/rewards.py:";

std::string program(const std::string& way) {
  return "command:'" + find_python().string() + "' tests/data/programs/grader.py " + way;
}

RewardParts parts(std::initializer_list<std::optional<double>> values) { return values; }
constexpr auto kNone = std::nullopt;

class Rewards : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
    EXPECT_EQ(errno, ECHILD);
  }
  std::vector<ScoredCompletion> some(int completions) const {
    std::vector<ScoredCompletion> all;
    for (int i = 0; i < completions; ++i) all.push_back({&row_, std::string(static_cast<std::size_t>(i), 'x'), {i}});
    return all;
  }
  RewardOptions options(std::vector<std::string> functions, RewardErrors errors = RewardErrors::kStop, double timeout = 60) const {
    return {.functions = std::move(functions), .timeout_seconds = timeout, .errors = errors, .echo_errors = false};
  }
  template <class E = ProcessError>
  std::string refused(const std::string& function, double timeout = 60) const {
    return message_of<E>([&] {
      RewardFunctions rewards(options({function}, RewardErrors::kStop, timeout));
      rewards.prepare();
      rewards.score(some(2));
      rewards.score(some(2));
    });
  }

  PromptRow row_ = {.prompt_id = "1", .prompt = "p", .prompt_ids = {}, .columns = {{"answer", 4}}};
};

TEST_F(Rewards, of_several_functions_come_in_their_order) {
  RewardFunctions rewards(options({kPython + "length", program("no id"), kPython + "some_missing", program("")}));
  rewards.prepare();
  EXPECT_THAT(rewards.score(some(2)), ElementsAre(parts({0.0, 0.0, 1.0, 0.0}), parts({1.0, 1.0, kNone, 1.0})));
  EXPECT_TRUE(rewards.score({}).empty());
}

TEST_F(Rewards, have_names_for_metrics_that_differ) {
  EXPECT_THAT(reward_names({"a.py:f", "b.py:f", "command:bin/grade.sh --x", "command:'my grader' f", "c.py:f_2", "d.py:f"}),
              ElementsAre("f", "f_2", "grade.sh", "my grader", "f_2_2", "f_3"));
}

TEST_F(Rewards, a_program_gets_prompts_completions_ids_and_columns) {
  RewardFunctions rewards(options({program("seen")}));
  EXPECT_THAT(rewards.score(some(2)), ElementsAre(parts({1.0}), parts({1.0})));
  RewardFunctions without(options({program("missing")}));
  EXPECT_THAT(without.score(some(2)), ElementsAre(parts({kNone}), parts({kNone})));
}

TEST_F(Rewards, are_added_with_their_weights_and_missing_ones_left_out) {
  const auto weights = reward_weights({"a.py:f", "a.py:g"}, std::vector<double>{2.0, -0.5});
  EXPECT_EQ(weighted_reward({1.0, 4.0}, weights), 0.0);
  EXPECT_EQ(weighted_reward({kNone, 4.0}, weights), -2.0);
  EXPECT_EQ(weighted_reward({kNone, kNone}, weights), kNone);
  EXPECT_THAT(reward_weights({"a.py:f", "a.py:g"}, kNone), ElementsAre(1.0, 1.0));
  EXPECT_EQ(message_of<ConfigError>([] {
              reward_weights({"a.py:f"}, std::vector<double>{1.0, 2.0});
            }),
            "objective.reward_weights: got 2 weights, wanted 1: one for each of data.reward");
}

TEST_F(Rewards, a_program_that_fails_stops_the_run_with_what_happened) {
  EXPECT_THAT(refused(program("too few")), HasSubstr("grader.py too few: got a list of 1, wanted 2 rewards"));
  EXPECT_THAT(refused(program("nan")), AllOf(HasSubstr("NaN"), HasSubstr("wanted the JSON answer to request 1")));
  EXPECT_THAT(refused(program("text")), HasSubstr("got \"1\" for completion 0, wanted a number or null"));
  EXPECT_THAT(refused(program("rubbish")), HasSubstr("got \"Hello, world\", wanted the JSON answer to request 1"));
  EXPECT_THAT(refused(program("other id")), HasSubstr("wanted the JSON answer to request 1"));
  EXPECT_THAT(refused(program("error")), HasSubstr("it answers with the error no opinion today"));
  EXPECT_THAT(refused(program("dies on the second call")),
              AllOf(HasSubstr("ended with exit status 9"), HasSubstr("| out of ideas")));
  EXPECT_THAT(refused(program("hangs on the second call"), 0.5), HasSubstr("gave no answer within 0.5 s"));
}

TEST_F(Rewards, a_program_that_cannot_be_started_is_found_before_work_is_spent) {
  EXPECT_THAT(refused<ConfigError>("command:/no/such/program x"), HasSubstr("/no/such/program: can't be started: No such file"));
  EXPECT_THAT(refused<ConfigError>("command:grade | tee log"), HasSubstr("put them into a script"));
  EXPECT_THAT(refused<ConfigError>("command:grade \"x"), HasSubstr("has quotes that do not match"));
  EXPECT_THAT(refused<ConfigError>("command:$LONGSTRAW_NO_SUCH_VARIABLE"), HasSubstr("variable that is not set"));
  EXPECT_THAT(refused<ConfigError>("command:''"), HasSubstr("names no program"));
  EXPECT_THAT(refused<ConfigError>(kPython + "lenght"), HasSubstr("has no function lenght"));
}

TEST_F(Rewards, of_a_function_that_fails_are_missing_and_the_run_goes_on) {
  RewardFunctions rewards(
      options({kPython + "raises", kPython + "length", program("too few"), kPython + "not_a_number"}, RewardErrors::kNull));
  rewards.prepare();
  testing::internal::CaptureStderr();
  for (int call = 0; call < 2; ++call) {
    EXPECT_THAT(rewards.score(some(2)), ElementsAre(parts({kNone, 0.0, kNone, kNone}), parts({kNone, 1.0, kNone, kNone})));
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(rewards.failed_calls(), ElementsAre(2, 0, 2, 2));
  const auto times = [&](const std::string& text) {
    int count = 0;
    for (std::size_t at = said.find(text); at != std::string::npos; at = said.find(text, at + 1)) ++count;
    return count;
  };
  EXPECT_EQ(times("raises raised ZeroDivisionError"), 1);
  EXPECT_EQ(times("too few: got a list of 1"), 1);
  EXPECT_EQ(times("not_a_number returned nan"), 1);
}

TEST_F(Rewards, of_functions_beside_one_that_dies_go_on_in_a_process_that_is_started_again) {
  RewardFunctions rewards(
      options({kPython + "counts_calls", kPython + "dies", program("dies on the second call")}, RewardErrors::kNull));
  testing::internal::CaptureStderr();
  // The process that counted the first call goes down with the function beside it, but only once: then that has its own.
  EXPECT_THAT(rewards.score(some(1)), ElementsAre(parts({1.0, kNone, 0.0})));
  EXPECT_THAT(rewards.score(some(1)), ElementsAre(parts({1.0, kNone, kNone})));
  EXPECT_THAT(rewards.score(some(1)), ElementsAre(parts({2.0, kNone, 0.0})));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("dies: ended with exit status 7"));
  EXPECT_THAT(rewards.failed_calls(), ElementsAre(0, 3, 1));
}

TEST_F(Rewards, of_functions_beside_one_that_hangs_go_on_in_a_process_that_is_started_again) {
  RewardFunctions rewards(options({kPython + "counts_calls", kPython + "hangs"}, RewardErrors::kNull, 1.0));
  testing::internal::CaptureStderr();
  for (const double calls : {1.0, 1.0, 2.0}) EXPECT_THAT(rewards.score(some(1)), ElementsAre(parts({calls, kNone})));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("hangs: gave no answer within 1 s"));
  EXPECT_THAT(rewards.failed_calls(), ElementsAre(0, 3));
}

}  // namespace
}  // namespace longstraw::core::data
