#pragma once
// The reward functions of a run, data.reward: Python functions and programs (docs/rollouts.md), each with its name for metrics.
//
//   RewardFunctions rewards({.functions = *config.data.reward});
//   rewards.prepare();                    // faults before work is spent
//   auto parts = rewards.score(scored);   // [completion][function]
//   auto reward = weighted_reward(parts[0], reward_weights(functions, config.objective.reward_weights));
//
// The Python functions share a process, until one of them hangs, dies or talks rubbish: that one then gets a process of its own,
// and the others a new one. Not for use from two threads at once.

#include "core/data/config.h"
#include "core/data/reward_request.h"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::data {

using RewardParts = std::vector<std::optional<double>>;  // by function; nothing where it gave none

struct RewardOptions {
  std::vector<std::string> functions;  // FILE.py:FUNCTION or command:PROGRAM ARGUMENTS
  double timeout_seconds = 60.0;       // for one call of one function
  RewardErrors errors = RewardErrors::kStop;
  std::filesystem::path python = {};  // empty: find_python()
  bool echo_errors = true;            // pass what the processes print on to our standard error
};

// As metrics call them: the Python function's name, the program's file name; a second one of a name is called NAME_2.
std::vector<std::string> reward_names(const std::vector<std::string>& functions);

// One a function, 1 where none are given. ConfigError when there are more or fewer.
std::vector<double> reward_weights(const std::vector<std::string>& functions, const std::optional<std::vector<double>>& weights);

// Σ_k w_k r_k over the parts that there are; nothing when there is none.
std::optional<double> weighted_reward(const RewardParts& parts, const std::vector<double>& weights);

class RewardFunctions {
 public:
  // ConfigError for a program's words that can't be split. Starts nothing yet.
  explicit RewardFunctions(RewardOptions options);
  ~RewardFunctions();
  RewardFunctions(const RewardFunctions&) = delete;
  RewardFunctions& operator=(const RewardFunctions&) = delete;

  const std::vector<std::string>& names() const { return names_; }

  // Starts the processes and looks each function up. ConfigError for what does not exist or can't be started, ProcessError for what
  // can't be imported, whatever `errors` says.
  void prepare();

  // Parts [completion][function]. A function that raises, hangs, dies, or answers anything but one finite number or null a
  // completion: with kStop ProcessError naming it, what happened and its last words; with kNull its parts of this call are missing,
  // the call is counted, and the fault is said on standard error the first time that it is of its kind.
  std::vector<RewardParts> score(const std::vector<ScoredCompletion>& completions);

  // By function: calls whose rewards are missing for a fault.
  std::vector<std::int64_t> failed_calls() const;

 private:
  struct Function;
  std::vector<std::optional<double>> call(Function& function, const std::vector<ScoredCompletion>& completions);

  RewardOptions options_;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<Function>> functions_;
};

}  // namespace longstraw::core::data
