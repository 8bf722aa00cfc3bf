#pragma once
// A reward function that is a program of its own, in any language: `command:PROGRAM ARGUMENTS`. It reads one JSON request a line
// and writes one JSON answer a line (docs/rollouts.md):
//
//   {"id": 1, "prompts": [...], "completions": [TEXT, ...], "completion_ids": [[...], ...], "columns": {NAME: [...], ...}}
//   {"id": 1, "rewards": [number or null, ...]}     or     {"id": 1, "error": "why not"}
//
// The answer may leave the id out. The words are split as the shell does (quotes, $VARIABLES, ~, wildcards); pipes and other
// syntax of the shell are refused: they belong into a script.

#include "core/data/child_process.h"
#include "core/data/reward_request.h"

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::core::data {

constexpr std::string_view kRewardProgramPrefix = "command:";

class RewardProgram {
 public:
  struct Options {
    double timeout_seconds = 60.0;
    bool echo_errors = true;
  };

  // Starts nothing yet. ConfigError for words that can't be split.
  RewardProgram(std::string name, Options options);

  // Starts the program, unless it runs. ProcessError when it can't be started.
  void start();
  // One reward a completion; starts the program first where it does not run. ProcessError when it takes longer than the time-out,
  // ends, or answers anything else; after the first three it has been ended.
  std::vector<std::optional<double>> score(const std::vector<ScoredCompletion>& completions);

  const std::vector<std::string>& words() const { return words_; }

 private:
  nlohmann::json ask(nlohmann::json request);

  std::string name_;
  Options options_;
  std::vector<std::string> words_;
  std::unique_ptr<ChildProcess> child_;
  std::int64_t requests_ = 0;
};

}  // namespace longstraw::core::data
