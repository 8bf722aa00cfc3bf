// longstraw compare: the same as longstraw-compare, with bounds from the configuration's section `compare`.

#include "app/command_line.h"

#include "compare/command.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

namespace longstraw::app {
namespace {

struct CompareOptions {
  ConfigOptions config;
  CLI::App* verb = nullptr;
};

// The configuration as options of longstraw-compare; what the command line says itself wins.
std::vector<std::string> options_of(const compare::CompareConfig& config, const std::vector<std::string>& given) {
  const compare::CompareConfig defaults;
  std::vector<std::string> options;
  const auto add = [&](const std::string& name, std::optional<double> value, std::optional<double> standard) {
    const auto names_it = [&](const std::string& argument) { return argument == name || argument.starts_with(name + "="); };
    if (!value || value == standard || std::any_of(given.begin(), given.end(), names_it)) return;
    options.push_back(fmt::format("{}={}", name, *value));
  };
  add("--noise-factor", config.noise_factor, defaults.noise_factor);
  add("--bfloat16-factor", config.bfloat16_factor, defaults.bfloat16_factor);
  add("--whole-bound", config.whole_bound, {});
  add("--parameter-bound", config.parameter_bound, {});
  return options;
}

ExitStatus run_compare(const CompareOptions& options, const RunConfig& config) {
  const std::vector<std::string> given = options.verb->remaining();
  std::vector<std::string> arguments = options_of(config.compare, given);
  arguments.insert(arguments.end(), given.begin(), given.end());
  std::string name = "longstraw compare";
  std::vector<char*> argv{name.data()};
  for (auto& argument : arguments) argv.push_back(argument.data());
  const int status = compare::compare_main(int(argv.size()), argv.data());
  if (std::any_of(given.begin(), given.end(), [](const auto& a) { return a == "--help" || a == "-h"; })) {
    fmt::print(
        "\nBefore these, as for every verb: --config FILE, --set KEY.PATH=VALUE, --print-config. Bounds are the keys\n"
        "compare.noise_factor, compare.bfloat16_factor, compare.whole_bound and compare.parameter_bound.\n");
  }
  return static_cast<ExitStatus>(status);
}

}  // namespace

void add_compare(CLI::App& program, Action& chosen) {
  CLI::App& verb = *program.add_subcommand("compare", "how far two records' gradients are apart, and why (as longstraw-compare)");
  const auto options = std::make_shared<CompareOptions>();
  options->verb = &verb;
  add_config_options(verb, options->config);
  // Everything else, --help too, is the comparator's.
  verb.set_help_flag();
  verb.allow_extras();
  choose(verb, chosen, options, run_compare);
}

}  // namespace longstraw::app
