#pragma once
// The Python process that tokenizes, decodes and scores (python/longstraw/worker.py): C++ has no tokenizer, and a reward
// function that crashes, hangs or prints must not take the trainer with it.
//
//   ScoringProcess scoring({.model = "checkpoint", .timeout_seconds = 60});
//   auto ids = scoring.encode("What is 2 + 2?");
//   auto texts = scoring.decode({{5, 6, 7}});
//   auto rewards = scoring.reward("rewards.py:graded", scored);
//
// Throws ConfigError when the reward function or its file does not exist, FormatError when the checkpoint has no usable
// tokenizer, ProcessError for what goes wrong while running: a reward function that raises (its message, file and
// line are quoted; the process goes on), returns too few or too many rewards, something that is no number, NaN or
// infinity; a process that dies (exit status and last lines of its standard error are quoted), hangs past its time
// (it is ended with all it started), or answers rubbish.
// Not for use from two threads at once.

#include "core/data/child_process.h"
#include "core/data/reward_request.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::data {

struct ScoringOptions {
  std::filesystem::path model = {};       // folder of the checkpoint whose tokenizer is used; empty: none is needed
  double timeout_seconds = 60.0;          // for one call of a reward function
  double load_timeout_seconds = 300.0;    // for everything else: starting Python, importing transformers, tokenizing
  std::filesystem::path python = {};      // empty: find_python()
  std::vector<std::string> command = {};  // another worker in its place (for tests)
  bool echo_errors = true;                // pass what the process prints on to our standard error
};

// The interpreter: $LONGSTRAW_PYTHON, else $LONGSTRAW_TORCH/bin/python, else that of the environment that the build
// used, else python3.
std::filesystem::path find_python();

// How to start main(`arguments`) of a module of the Python package `longstraw`, in that interpreter.
ChildOptions python_module(const std::string& module, const std::string& arguments = "");

class ScoringProcess {
 public:
  // Returns at once. With a model the process begins to import transformers, which takes seconds: start it early.
  explicit ScoringProcess(ScoringOptions options);

  // `prompt`: a text (tokenized with the tokenizer's special tokens), or a list of chat messages (through the chat
  // template, with the generation prompt).
  std::vector<std::int64_t> encode(const nlohmann::json& prompt);
  std::vector<std::string> decode(const std::vector<std::vector<std::int64_t>>& ids, bool skip_special_tokens = true);

  // Writes the data set `file` as JSONL rows with prompt_ids (python/longstraw/prepare.py). An empty `model`: all rows have theirs.
  void prepare_prompts(const std::filesystem::path& file, const std::filesystem::path& model, const std::filesystem::path& out);

  // Imports FILE.py and looks FUNCTION up; reward() does it by itself, this only finds a fault before work is spent.
  void prepare_reward(const std::string& function);
  // One reward a completion, in their order; nothing where the function returned None. Columns are those of the prompts,
  // repeated for each completion as TRL does, null for a prompt that lacks one.
  std::vector<std::optional<double>> reward(const std::string& function, const std::vector<ScoredCompletion>& completions);

  ChildProcess& process() { return child_; }

 private:
  nlohmann::json ask(nlohmann::json request, double seconds, const std::string& doing);
  void load_tokenizer();

  ScoringOptions options_;
  ChildProcess child_;
  std::int64_t requests_ = 0;
  bool tokenizer_loaded_ = false;
};

}  // namespace longstraw::core::data
