#include "core/data/reward_process.h"

#include "core/base/errors.h"
#include "core/data/json_lines.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>

namespace longstraw::core::data {
namespace {

using nlohmann::json;

// Where the package `longstraw` is found.
std::vector<std::string> python_environment() {
  std::error_code ignored;
  if (!std::filesystem::is_directory(LONGSTRAW_PYTHON_DIR, ignored)) return {};
  const char* users = std::getenv("PYTHONPATH");
  const bool any = users != nullptr && *users != '\0';
  return {fmt::format("PYTHONPATH={}{}{}", LONGSTRAW_PYTHON_DIR, any ? ":" : "", any ? users : "")};
}

ChildOptions child_options(const ScoringOptions& options) {
  if (!options.command.empty()) {
    return {.command = options.command, .environment = python_environment(), .echo_errors = options.echo_errors};
  }
  auto child = python_module("longstraw.worker",
                             fmt::format("parent={}, import_early={}", ::getpid(), options.model.empty() ? "False" : "True"));
  if (!options.python.empty()) child.command.front() = options.python.string();
  child.echo_errors = options.echo_errors;
  return child;
}

[[noreturn]] void raise(const json& answer) {
  const std::string message = answer["error"].is_string() ? answer["error"].get<std::string>() : answer["error"].dump();
  const std::string kind = answer.value("kind", "");
  if (kind == "config") throw ConfigError(message);
  if (kind == "input") throw FormatError(message);
  if (kind == "io") throw IoError(message);
  throw ProcessError(kind == "answer" ? ProcessFault::kAnswer : ProcessFault::kRaised, message);
}

bool is_token_list(const json& ids) {
  if (!ids.is_array()) return false;
  for (const json& id : ids) {
    if (!id.is_number_unsigned()) return false;
  }
  return true;
}

}  // namespace

std::filesystem::path find_python() {
  const auto given = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
  };
  if (const std::string python = given("LONGSTRAW_PYTHON"); !python.empty()) return python;
  if (const std::string folder = given("LONGSTRAW_TORCH"); !folder.empty()) return std::filesystem::path(folder) / "bin/python";
  if (::access(LONGSTRAW_BUILD_PYTHON, X_OK) == 0) return LONGSTRAW_BUILD_PYTHON;
  return "python3";
}

ChildOptions python_module(const std::string& module, const std::string& arguments) {
  // The working folder is kept out of the module path: a json.py that lies there is not meant.
  constexpr auto kStart = "import sys; sys.path = [p for p in sys.path if p]; from {} import main; main({})";
  return {.command = {find_python().string(), "-c", fmt::format(kStart, module, arguments)},
          .environment = python_environment(),
          .echo_errors = true};
}

ScoringProcess::ScoringProcess(ScoringOptions options) : options_(std::move(options)), child_(child_options(options_)) {}

json ScoringProcess::ask(json request, double seconds, const std::string& doing) {
  const std::int64_t id = ++requests_;
  request["id"] = id;
  std::string line;
  try {
    line = child_.exchange(request.dump(-1, ' ', true, json::error_handler_t::replace), std::chrono::duration<double>(seconds));
  } catch (const ProcessError& error) {
    throw ProcessError(error.fault(), fmt::format("scoring process, {}: {}", doing, error.what()));
  }
  json answer = json::parse(line, nullptr, false);
  if (!answer.is_object() || !answer.contains("id") || answer["id"] != id) {
    child_.kill();  // whatever it says next can't be told from the answer
    const std::string shown = json(line.substr(0, 80)).dump(-1, ' ', false, json::error_handler_t::replace);
    throw ProcessError(ProcessFault::kRubbish, fmt::format("scoring process, {}: got {}, wanted the answer to request {}{}", doing,
                                                           shown, id, child_.last_words()));
  }
  if (answer.contains("error")) raise(answer);
  return answer;
}

void ScoringProcess::load_tokenizer() {
  if (tokenizer_loaded_) return;
  if (options_.model.empty()) throw ConfigError("model.path: is empty, wanted the checkpoint whose tokenizer is used");
  ask({{"op", "load"}, {"model", std::filesystem::absolute(options_.model).string()}}, options_.load_timeout_seconds,
      "loading the tokenizer");
  tokenizer_loaded_ = true;
}

std::vector<std::int64_t> ScoringProcess::encode(const json& prompt) {
  load_tokenizer();
  const json answer = ask({{"op", "encode"}, {"prompt", prompt}}, options_.load_timeout_seconds, "tokenizing");
  const json ids = answer.value("ids", json());
  if (!is_token_list(ids))
    throw CommunicationError(fmt::format("scoring process, tokenizing: got {}, wanted token ids", describe(ids)));
  return ids.get<std::vector<std::int64_t>>();
}

std::vector<std::string> ScoringProcess::decode(const std::vector<std::vector<std::int64_t>>& ids, bool skip_special_tokens) {
  load_tokenizer();
  const json answer = ask({{"op", "decode"}, {"ids", ids}, {"skip_special_tokens", skip_special_tokens}},
                          options_.load_timeout_seconds, "decoding");
  const json texts = answer.value("texts", json());
  std::vector<std::string> result;
  if (texts.is_array()) {
    for (const json& text : texts) {
      if (text.is_string()) result.push_back(text.get<std::string>());
    }
  }
  if (result.size() != ids.size() || texts.size() != ids.size()) {
    throw CommunicationError(fmt::format("scoring process, decoding: got {}, wanted {} texts", describe(texts), ids.size()));
  }
  return result;
}

void ScoringProcess::prepare_prompts(const std::filesystem::path& file, const std::filesystem::path& model,
                                     const std::filesystem::path& out) {
  // However large the data set is: a process that works on it is not one that hangs.
  constexpr double kNoLimit = 1e8;
  const std::string folder = model.empty() ? "" : std::filesystem::absolute(model).string();
  ask({{"op", "prepare_prompts"}, {"file", file.string()}, {"model", folder}, {"out", out.string()}}, kNoLimit,
      "preparing " + file.string());
  tokenizer_loaded_ = false;  // the process may hold another checkpoint's now
}

void ScoringProcess::prepare_reward(const std::string& function) {
  ask({{"op", "prepare"}, {"function", function}}, options_.load_timeout_seconds, "importing the reward function " + function);
}

std::vector<std::optional<double>> ScoringProcess::reward(const std::string& function,
                                                          const std::vector<ScoredCompletion>& completions) {
  prepare_reward(function);  // its imports take time that is not its own
  json request = reward_request(completions);
  request["op"] = "reward";
  request["function"] = function;
  const json answer = ask(std::move(request), options_.timeout_seconds, "reward function " + function);
  return rewards_in(answer, function, completions.size());
}

}  // namespace longstraw::core::data
