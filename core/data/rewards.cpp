#include "core/data/rewards.h"

#include "core/base/errors.h"
#include "core/data/reward_process.h"
#include "core/data/reward_program.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <set>

namespace longstraw::core::data {
namespace {

bool is_program(const std::string& function) { return function.starts_with(kRewardProgramPrefix); }

// One process of Python functions, started when it is needed, and again when it has ended.
class PythonProcess {
 public:
  explicit PythonProcess(const RewardOptions& options) : options_(options) {}

  ScoringProcess& running() {
    if (!scoring_ || !scoring_->process().is_running()) {
      scoring_.reset();
      scoring_ = std::make_unique<ScoringProcess>(ScoringOptions{
          .timeout_seconds = options_.timeout_seconds, .python = options_.python, .echo_errors = options_.echo_errors});
    }
    return *scoring_;
  }

 private:
  const RewardOptions& options_;
  std::unique_ptr<ScoringProcess> scoring_;
};

std::string base_name(const std::string& function) {
  if (!is_program(function)) return function.substr(function.rfind(':') + 1);
  return std::filesystem::path(RewardProgram(function, {}).words().front()).filename().string();
}

}  // namespace

struct RewardFunctions::Function {
  std::string text;
  std::shared_ptr<PythonProcess> python;  // of a Python function, shared with others
  std::unique_ptr<RewardProgram> program;
  std::int64_t failed = 0;
  std::set<ProcessFault> said;
};

std::vector<std::string> reward_names(const std::vector<std::string>& functions) {
  std::vector<std::string> names;
  std::set<std::string> taken;
  for (const std::string& function : functions) {
    const std::string base = base_name(function);
    std::string name = base;
    for (int n = 2; !taken.insert(name).second; ++n) name = fmt::format("{}_{}", base, n);
    names.push_back(name);
  }
  return names;
}

std::vector<double> reward_weights(const std::vector<std::string>& functions, const std::optional<std::vector<double>>& weights) {
  if (!weights) return std::vector<double>(functions.size(), 1.0);
  if (weights->size() != functions.size()) {
    throw ConfigError(fmt::format("objective.reward_weights: got {} weights, wanted {}: one for each of data.reward",
                                  weights->size(), functions.size()));
  }
  return *weights;
}

std::optional<double> weighted_reward(const RewardParts& parts, const std::vector<double>& weights) {
  std::optional<double> sum;
  for (std::size_t k = 0; k < parts.size(); ++k) {
    if (parts[k]) sum = sum.value_or(0.0) + weights.at(k) * *parts[k];
  }
  return sum;
}

RewardFunctions::RewardFunctions(RewardOptions options) : options_(std::move(options)), names_(reward_names(options_.functions)) {
  const auto shared = std::make_shared<PythonProcess>(options_);
  for (const std::string& text : options_.functions) {
    functions_.push_back(std::make_unique<Function>());
    Function& function = *functions_.back();
    function.text = text;
    if (is_program(text)) {
      const RewardProgram::Options program{.timeout_seconds = options_.timeout_seconds, .echo_errors = options_.echo_errors};
      function.program = std::make_unique<RewardProgram>(text, program);
    } else {
      function.python = shared;
    }
  }
}

RewardFunctions::~RewardFunctions() = default;

void RewardFunctions::prepare() {
  for (const auto& function : functions_) {
    if (function->program) {
      try {
        function->program->start();
      } catch (const ProcessError& error) {
        throw ConfigError(fmt::format("data.reward: {}: {}", function->text, error.what()));
      }
    } else {
      function->python->running().prepare_reward(function->text);
    }
  }
}

std::vector<std::optional<double>> RewardFunctions::call(Function& function, const std::vector<ScoredCompletion>& completions) {
  try {
    return function.program ? function.program->score(completions) : function.python->running().reward(function.text, completions);
  } catch (const ProcessError& error) {
    if (options_.errors == RewardErrors::kStop) throw;
    ++function.failed;
    if (function.said.insert(error.fault()).second) {
      std::fflush(stdout);
      fmt::print(stderr,
                 "longstraw: {}\nlongstraw: the rewards of this call count as missing (data.reward_errors: null); more faults of "
                 "this kind are counted, not said\n",
                 error.what());
    }
    const bool answered = error.fault() == ProcessFault::kRaised || error.fault() == ProcessFault::kAnswer;
    if (function.python && !answered) function.python = std::make_shared<PythonProcess>(options_);
    return std::vector<std::optional<double>>(completions.size());
  }
}

std::vector<RewardParts> RewardFunctions::score(const std::vector<ScoredCompletion>& completions) {
  std::vector<RewardParts> parts(completions.size(), RewardParts(functions_.size()));
  if (completions.empty()) return parts;
  for (std::size_t k = 0; k < functions_.size(); ++k) {
    const auto rewards = call(*functions_[k], completions);
    for (std::size_t m = 0; m < rewards.size(); ++m) parts[m][k] = rewards[m];
  }
  return parts;
}

std::vector<std::int64_t> RewardFunctions::failed_calls() const {
  std::vector<std::int64_t> counts;
  for (const auto& function : functions_) counts.push_back(function->failed);
  return counts;
}

}  // namespace longstraw::core::data
