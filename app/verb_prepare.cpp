// longstraw prepare: a data set in tokens. The tokenizer is Hugging Face's, so this becomes python/longstraw/prepare.py.

#include "app/command_line.h"

#include "core/data/reward_process.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace longstraw::app {
namespace {

struct PrepareOptions {
  std::string data, model, out;
  std::string long_prompt = "error";
  std::string template_kwargs = "{}";
  int64_t longest = 0;
  int64_t processes = 1;
};

std::vector<std::string> arguments_of(const PrepareOptions& options) {
  std::vector<std::string> arguments{"--out=" + options.out, "--model=" + options.model, "--long-prompt=" + options.long_prompt,
                                     "--chat-template-kwargs=" + options.template_kwargs,
                                     fmt::format("--num-proc={}", options.processes)};
  if (options.longest > 0) arguments.push_back(fmt::format("--max-prompt-length={}", options.longest));
  arguments.insert(arguments.end(), {"--", options.data});
  return arguments;
}

// Returns only when Python can't be started.
ExitStatus run_prepare(const PrepareOptions& options) {
  core::data::ChildOptions python = core::data::python_module("longstraw.prepare");
  for (const auto& argument : arguments_of(options)) python.command.push_back(argument);
  for (std::string& entry : python.environment) ::putenv(entry.data());
  std::vector<char*> words;
  for (std::string& word : python.command) words.push_back(word.data());
  words.push_back(nullptr);
  std::fflush(nullptr);
  sigset_t none;  // it would inherit the signals that we hold back
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::execvp(words.front(), words.data());
  throw CommunicationError(fmt::format("{}: can't be started: {}", python.command.front(), std::strerror(errno)));
}

}  // namespace

void add_prepare(CLI::App& program, Action& chosen) {
  CLI::App& verb = *program.add_subcommand("prepare", "tokenize a data set of prompts, JSONL or Parquet, once for many runs");
  const auto options = std::make_shared<PrepareOptions>();
  verb.add_option("data", options->data, "JSONL or Parquet with a column prompt (a text or chat messages) or prompt_ids")
      ->required()
      ->type_name("FILE");
  verb.add_option("--model", options->model, "checkpoint whose tokenizer and chat template are used")->type_name("DIR");
  verb.add_option("--out", options->out, "the JSONL file to write")->required()->type_name("FILE.jsonl");
  verb.add_option("--max-prompt-length", options->longest, "longest prompt allowed, in tokens")
      ->check(CLI::PositiveNumber)
      ->type_name("N");
  verb.add_option("--long-prompt", options->long_prompt, "what is done with a longer one")
      ->check(CLI::IsMember({"error", "left_truncate", "skip"}))
      ->capture_default_str();
  verb.add_option("--chat-template-kwargs", options->template_kwargs, "a JSON object, handed to the chat template")
      ->type_name("JSON");
  verb.add_option("--num-proc", options->processes, "processes that tokenize")
      ->check(CLI::PositiveNumber)
      ->capture_default_str()
      ->type_name("N");
  verb.footer(
      "Writes rows {\"prompt_id\", \"prompt\", \"prompt_ids\", ...the other columns}, whole or not at all (docs/rollouts.md).");
  verb.callback([&chosen, options] { chosen = [options] { return run_prepare(*options); }; });
}

}  // namespace longstraw::app
