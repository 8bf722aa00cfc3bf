#include "core/data/reward_program.h"

#include "core/base/errors.h"
#include "core/data/json_lines.h"

#include <fmt/format.h>
#include <wordexp.h>

#include <chrono>

namespace longstraw::core::data {
namespace {

using nlohmann::json;

std::string why_not(int problem) {
  switch (problem) {
    case WRDE_BADCHAR: return "has one of | & ; < > ( ) { } outside quotes, which only a shell understands; put them into a script";
    case WRDE_BADVAL: return "names an environment variable that is not set";
    case WRDE_CMDSUB: return "has a command within the command; put it into a script";
    default: return "has quotes that do not match";
  }
}

std::vector<std::string> split(const std::string& name) {
  const std::string text = name.substr(kRewardProgramPrefix.size());
  wordexp_t expanded{};
  const int problem = ::wordexp(text.c_str(), &expanded, WRDE_NOCMD | WRDE_UNDEF);
  if (problem != 0) throw ConfigError(fmt::format("data.reward: {} {}", name, why_not(problem)));
  std::vector<std::string> words(expanded.we_wordv, expanded.we_wordv + expanded.we_wordc);
  ::wordfree(&expanded);
  if (words.empty() || words.front().empty()) throw ConfigError(fmt::format("data.reward: {} names no program", name));
  return words;
}

}  // namespace

RewardProgram::RewardProgram(std::string name, Options options) : name_(std::move(name)), options_(options), words_(split(name_)) {}

void RewardProgram::start() {
  if (child_ && child_->is_running()) return;
  child_.reset();
  child_ = std::make_unique<ChildProcess>(ChildOptions{.command = words_, .environment = {}, .echo_errors = options_.echo_errors});
}

json RewardProgram::ask(json request) {
  const std::int64_t id = ++requests_;
  request["id"] = id;
  std::string line;
  try {
    line = child_->exchange(request.dump(-1, ' ', true, json::error_handler_t::replace),
                            std::chrono::duration<double>(options_.timeout_seconds));
  } catch (const ProcessError& error) {
    throw ProcessError(error.fault(), fmt::format("reward function {}: {}", name_, error.what()));
  }
  json answer = json::parse(line, nullptr, false);
  if (!answer.is_object() || (answer.contains("id") && answer["id"] != id)) {
    child_->kill();  // whatever it says next can't be told from the answer
    const std::string shown = json(line.substr(0, 80)).dump(-1, ' ', false, json::error_handler_t::replace);
    throw ProcessError(ProcessFault::kRubbish, fmt::format("reward function {}: got {}, wanted the JSON answer to request {}{}",
                                                           name_, shown, id, child_->last_words()));
  }
  if (answer.contains("error")) {
    const json& error = answer["error"];
    throw ProcessError(ProcessFault::kRaised, fmt::format("reward function {}: it answers with the error {}", name_,
                                                          error.is_string() ? error.get<std::string>() : describe(error)));
  }
  return answer;
}

std::vector<std::optional<double>> RewardProgram::score(const std::vector<ScoredCompletion>& completions) {
  start();
  return rewards_in(ask(reward_request(completions)), name_, completions.size());
}

}  // namespace longstraw::core::data
