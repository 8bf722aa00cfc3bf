#pragma once
// What all verbs have in common on the command line: the configuration, from a file and single keys.

#include "app/config.h"

#include "core/base/errors.h"

#include <CLI/CLI.hpp>

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::app {

struct ConfigOptions {
  std::optional<std::string> file;
  std::vector<std::string> sets;       // --set key.path=value
  std::vector<std::string> shortcuts;  // what options such as --model stand for; they win over --set
  bool print_config = false;
  bool unscored = false;  // of the verb: prompts need no reward
};

// --config, --set and --print-config; the verb's --help then ends with all keys.
void add_config_options(CLI::App& verb, ConfigOptions& options);

// An option that stands for configuration keys: the first gets its value, the others become null.
void add_shortcut(CLI::App& verb, ConfigOptions& options, const std::string& name, const std::string& key, const std::string& help,
                  std::initializer_list<const char*> nulls = {});

// `defaults` is what a verb starts from. Throws ConfigError with all faults.
RunConfig load_config(const ConfigOptions& options, RunConfig defaults = {});

// What a verb does once the whole command line is understood.
using Action = std::function<ExitStatus()>;

// One function a verb: adds it to the program, and sets `chosen` when the command line names it.
void add_verify(CLI::App& program, Action& chosen);
void add_gradients(CLI::App& program, Action& chosen);
void add_generate(CLI::App& program, Action& chosen);
void add_train(CLI::App& program, Action& chosen);
void add_prepare(CLI::App& program, Action& chosen);
void add_compare(CLI::App& program, Action& chosen);
void add_rewards(CLI::App& program, Action& chosen);
void add_inspect(CLI::App& program, Action& chosen);
// `command`: the whole command line, kept in the study.
void add_study(CLI::App& program, Action& chosen, const std::string& command);

void print_config(const RunConfig& config);

// When the verb is chosen: load the configuration into what `run` gets, or print it and end.
template <class Options>
void choose(CLI::App& verb, Action& chosen, std::shared_ptr<Options> options, ExitStatus (*run)(const Options&, const RunConfig&),
            RunConfig defaults = {}) {
  verb.callback([&chosen, options, run, defaults] {
    chosen = [options, run, defaults] {
      const RunConfig config = load_config(options->config, defaults);
      if (!options->config.print_config) return run(*options, config);
      print_config(config);
      return ExitStatus::kWithinBounds;
    };
  });
}

}  // namespace longstraw::app
