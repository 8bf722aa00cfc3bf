// Reward functions that work, and every way in which they, or their process, do not.

#include "core/data/reward_process.h"
#include "tests/data/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <thread>

namespace longstraw::core::data {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::message_of;
using testing_support::Scratch;

const std::string kRewards = "tests/data/rewards/rewards.py:";

PromptRow prompt_of(const json& prompt, const json& columns) {
  PromptRow row;
  row.prompt = prompt;
  row.columns = columns;
  return row;
}

class Scoring : public testing::Test {
 protected:
  // Nothing of a scoring process may stay behind: neither a zombie nor what a reward function started.
  void TearDown() override {
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
    EXPECT_EQ(errno, ECHILD);
  }

  std::vector<std::optional<double>> rewards_of(const std::string& function, int completions = 2, double timeout = 60) {
    ScoringProcess scoring({.timeout_seconds = timeout, .echo_errors = false});
    return scoring.reward(kRewards + function, some(completions));
  }
  std::vector<ScoredCompletion> some(int completions) const {
    std::vector<ScoredCompletion> all;
    for (int i = 0; i < completions; ++i) all.push_back({&row_, std::string(static_cast<std::size_t>(i), 'x'), {i}});
    return all;
  }
  template <class E = CommunicationError>
  std::string refused(const std::string& function, int completions = 2, double timeout = 60) {
    return message_of<E>([&] { rewards_of(function, completions, timeout); });
  }
  std::string misbehaving(const std::string& way, double timeout = 60) {
    ScoringProcess scoring({.timeout_seconds = timeout,
                            .load_timeout_seconds = timeout,
                            .command = {find_python().string(), "tests/data/workers/misbehaving.py", way},
                            .echo_errors = false});
    return message_of<CommunicationError>([&] { scoring.reward("r.py:f", some(2)); });
  }

  PromptRow row_ = prompt_of("p", json::object());
};

TEST_F(Scoring, gives_one_reward_a_completion) {
  EXPECT_THAT(rewards_of("length", 3), ElementsAre(0.0, 1.0, 2.0));
  EXPECT_THAT(rewards_of("some_missing", 3), ElementsAre(1.0, std::nullopt, 1.0));
  EXPECT_THAT(rewards_of("is_async"), ElementsAre(2.0, 2.0));
  EXPECT_TRUE(rewards_of("length", 0).empty());
}

TEST_F(Scoring, passes_prompts_completions_and_columns_as_trl_does) {
  const PromptRow text = prompt_of("p", {{"answer", 4}, {"weight", 0.5}});
  const PromptRow chat = prompt_of(json::array({{{"role", "user"}, {"content", "q"}}}), {{"answer", {{"x", nullptr}}}});
  ScoringProcess scoring({.echo_errors = false});
  EXPECT_THAT(scoring.reward(kRewards + "seen", {{&text, "a", {1}}, {&text, "bb", {2, 2}}, {&chat, "ccc", {3, 3, 3}}}),
              ElementsAre(1.0, 1.0, 1.0));
}

TEST_F(Scoring, what_a_reward_function_prints_does_not_disturb_it) { EXPECT_THAT(rewards_of("prints"), ElementsAre(1.0, 1.0)); }

TEST_F(Scoring, goes_on_after_a_reward_function_that_raised) {
  ScoringProcess scoring({.echo_errors = false});
  const pid_t pid = scoring.process().pid();
  EXPECT_THROW(scoring.reward(kRewards + "raises", some(1)), CommunicationError);
  EXPECT_THAT(scoring.reward(kRewards + "length", some(2)), ElementsAre(0.0, 1.0));
  EXPECT_EQ(scoring.process().pid(), pid);
}

TEST_F(Scoring, quotes_what_a_reward_function_raised_and_where) {
  EXPECT_THAT(refused("raises"), AllOf(HasSubstr("rewards.py:raises raised ZeroDivisionError: division by zero"),
                                       HasSubstr("tests/data/rewards/rewards.py:52, in inner")));
  EXPECT_THAT(refused("exits"), HasSubstr("exits raised SystemExit: enough"));
  row_.columns = {{"answer", 1}};
  EXPECT_THAT(refused("takes_no_columns"),
              AllOf(HasSubstr("unexpected keyword argument 'answer'"), HasSubstr("give it **columns")));
}

TEST_F(Scoring, refuses_what_is_no_list_of_rewards) {
  EXPECT_THAT(refused("too_few", 3), HasSubstr("rewards.py:too_few returned 2 rewards for 3 completions"));
  EXPECT_THAT(refused("too_many", 3), HasSubstr("returned 4 rewards for 3 completions"));
  EXPECT_THAT(refused("no_list"), HasSubstr("returned 1.0 (float), wanted a list of 2 numbers"));
  EXPECT_THAT(refused("returns_nothing"), HasSubstr("returned None (NoneType), wanted a list of 2 numbers"));
  EXPECT_THAT(refused("no_number"), HasSubstr("returned 'good' (str) for completion 1, wanted a number or None"));
  EXPECT_THAT(refused("not_a_number"), HasSubstr("returned nan for completion 1, wanted a finite number"));
  EXPECT_THAT(refused("infinite"), HasSubstr("returned -inf for completion 0, wanted a finite number"));
  EXPECT_THAT(refused("too_large"), HasSubstr("returned inf for completion 0, wanted a finite number"));
}

TEST_F(Scoring, names_a_file_or_function_that_is_not_there) {
  EXPECT_THAT(refused<ConfigError>("lenght"), AllOf(HasSubstr("rewards.py has no function lenght; it has "), HasSubstr("length")));
  EXPECT_THAT(refused<ConfigError>("no_function"), HasSubstr("has no function no_function"));
  ScoringProcess scoring({.echo_errors = false});
  EXPECT_THAT(message_of<ConfigError>([&] { scoring.prepare_reward("none.py:f"); }), HasSubstr("none.py: no such file"));
  EXPECT_THAT(message_of<ConfigError>([&] { scoring.prepare_reward("tests/data/rewards/text.txt:f"); }),
              HasSubstr("text.txt: no such file"));
  EXPECT_THAT(
      message_of<CommunicationError>([&] { scoring.prepare_reward("tests/data/rewards/broken.py:reward"); }),
      AllOf(HasSubstr("can't be imported: ModuleNotFoundError"), HasSubstr("no_such_module_anywhere"), HasSubstr("broken.py:3")));
}

TEST_F(Scoring, says_how_the_process_died_and_its_last_words) {
  EXPECT_THAT(refused("dies"), AllOf(HasSubstr("rewards.py:dies: ended with exit status 7"), HasSubstr("| going down")));
  EXPECT_THAT(refused("aborts"), HasSubstr("ended with signal 6"));
  EXPECT_THAT(refused("dies_but_leaves_a_child"), HasSubstr("ended with exit status 3"));
}

TEST_F(Scoring, ends_a_process_that_hangs_with_all_that_it_started) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string message = refused("hangs", 2, 2.0);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  ASSERT_THAT(message, AllOf(HasSubstr("rewards.py:hangs: gave no answer within 2 s"), HasSubstr("| child ")));
  EXPECT_GE(taken.count(), 2.0);
  // Its orphan is reaped by init, or whoever stands in for it, which may take a moment.
  const pid_t orphan = std::stoi(message.substr(message.find("| child ") + 8));
  const auto is_running = [&] {
    std::ifstream stat("/proc/" + std::to_string(orphan) + "/stat");
    std::string text;
    std::getline(stat, text);
    return !text.empty() && text.find(") Z ") == std::string::npos;
  };
  for (int i = 0; i < 2000 && is_running(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_FALSE(is_running());
}

TEST_F(Scoring, a_process_that_has_ended_says_so_when_asked_again) {
  ScoringProcess scoring({.echo_errors = false});
  EXPECT_THROW(scoring.reward(kRewards + "dies", some(1)), CommunicationError);
  EXPECT_FALSE(scoring.process().is_running());
  EXPECT_THAT(message_of<CommunicationError>([&] { scoring.reward(kRewards + "length", some(1)); }),
              HasSubstr("has ended already"));
}

TEST_F(Scoring, refuses_answers_that_break_the_protocol) {
  EXPECT_THAT(misbehaving("rubbish"), HasSubstr("got \"Hello, world\", wanted the answer to request 2"));
  EXPECT_THAT(misbehaving("binary rubbish"), HasSubstr("wanted the answer to request 2"));
  EXPECT_THAT(misbehaving("wrong id"), HasSubstr("wanted the answer to request 2"));
  EXPECT_THAT(misbehaving("no rewards"), HasSubstr("r.py:f: got null, wanted 2 rewards"));
  EXPECT_THAT(misbehaving("too few"), HasSubstr("r.py:f: got a list of 0, wanted 2 rewards"));
  EXPECT_THAT(misbehaving("text"), HasSubstr("got \"1\" for completion 0, wanted a number or null"));
  EXPECT_THAT(misbehaving("half a line"), HasSubstr("ended with exit status 0"));
  EXPECT_THAT(misbehaving("closes output"), HasSubstr("closed its output"));
  EXPECT_THAT(misbehaving("dies at once"), AllOf(HasSubstr("ended with exit status 5"), HasSubstr("| no good morning")));
}

TEST_F(Scoring, neither_waits_for_ever_nor_fills_the_memory) {
  EXPECT_THAT(misbehaving("never reads", 0.5), HasSubstr("gave no answer within 0.5 s"));
  EXPECT_THAT(misbehaving("endless line", 0.5), HasSubstr("gave no answer within 0.5 s"));
  EXPECT_EQ(misbehaving("chatters first"), "(no error)");
}

TEST_F(Scoring, a_large_request_to_a_process_that_does_not_read_it_ends_in_time) {
  ScoringProcess scoring({.timeout_seconds = 0.5,
                          .load_timeout_seconds = 0.5,
                          .command = {find_python().string(), "tests/data/workers/misbehaving.py", "never reads"},
                          .echo_errors = false});
  EXPECT_THAT(message_of<CommunicationError>([&] { scoring.prepare_reward(std::string(8'000'000, 'x')); }),
              HasSubstr("gave no answer within 0.5 s"));
}

TEST_F(Scoring, names_a_python_that_is_not_there) {
  EXPECT_THAT(message_of<CommunicationError>([] { ScoringProcess({.python = "/no/such/python"}); }),
              HasSubstr("/no/such/python: can't be started: No such file or directory"));
}

TEST_F(Scoring, names_a_checkpoint_without_a_usable_tokenizer) {
  const Scratch scratch;
  {
    ScoringProcess scoring({.model = scratch.path("none"), .echo_errors = false});
    EXPECT_THAT(message_of<FormatError>([&] { scoring.encode("x"); }), HasSubstr("none: no such folder"));
  }
  ScoringProcess scoring({.echo_errors = false});
  EXPECT_THAT(message_of<ConfigError>([&] { scoring.encode("x"); }), HasSubstr("model.path: is empty"));
}

TEST_F(Scoring, the_process_ends_when_its_owner_is_killed_in_the_midst_of_a_call) {
  const Scratch scratch;
  const pid_t owner = ::fork();
  if (owner == 0) {
    ScoringProcess scoring({.echo_errors = false});
    std::ofstream(scratch.path("pid")) << scoring.process().pid() << std::endl;
    try {
      scoring.reward(kRewards + "hangs", some(1));
    } catch (...) {
    }
    ::_exit(0);
  }
  pid_t worker = 0;
  for (int i = 0; i < 3000 && worker == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::ifstream(scratch.path("pid")) >> worker;
  }
  ASSERT_GT(worker, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(700));  // Python starts and calls the function
  ::kill(owner, SIGKILL);
  ::waitpid(owner, nullptr, 0);
  const auto is_running = [&] {
    std::ifstream stat("/proc/" + std::to_string(worker) + "/stat");
    std::string text;
    std::getline(stat, text);
    return !text.empty() && text.find(") Z ") == std::string::npos;
  };
  for (int i = 0; i < 3000 && is_running(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_FALSE(is_running());
}

}  // namespace
}  // namespace longstraw::core::data
