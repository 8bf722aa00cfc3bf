#include "app/command_line.h"

#include "core/config/load.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cstdio>

namespace longstraw::app {

void add_config_options(CLI::App& verb, ConfigOptions& options) {
  verb.add_option("--config", options.file, "configuration, a YAML file")->type_name("FILE");
  verb.add_option("--set", options.sets, "one key of the configuration; may be repeated, the last wins")
      ->type_name("KEY.PATH=VALUE")
      ->allow_extra_args(false);
  verb.add_flag("--print-config", options.print_config, "print the resolved configuration as YAML and end");
  verb.footer([] {
    return "Configuration, with its defaults. Paths are relative to the current folder. Status: 0 within bounds or done, 1 beyond\n"
           "bounds, 2 wrong use or unusable input, 3 failure while running (also by Ctrl-C).\n\n" +
           core::config::help<RunConfig>();
  });
}

void add_shortcut(CLI::App& verb, ConfigOptions& options, const std::string& name, const std::string& key, const std::string& help,
                  std::initializer_list<const char*> nulls) {
  const std::vector<std::string> others(nulls.begin(), nulls.end());
  const auto apply = [&options, key, others](const std::string& value) {
    // A JSON text is a YAML text with every character as it is.
    options.shortcuts.push_back(key + "=" + nlohmann::json(value).dump());
    for (const auto& other : others) options.shortcuts.push_back(other + "=null");
  };
  verb.add_option_function<std::string>(name, apply, fmt::format("{} (the key {})", help, key))->type_name("PATH");
}

RunConfig load_config(const ConfigOptions& options, RunConfig config) {
  core::config::Faults faults;
  std::vector<core::config::Binding> bindings = core::config::bind(config);
  if (options.file) core::config::apply_file(*options.file, bindings, faults);
  for (const auto& text : options.sets) core::config::apply_override(text, bindings, faults);
  for (const auto& text : options.shortcuts) core::config::apply_override(text, bindings, faults);
  if (!options.unscored) core::config::check_across_fields(config, faults);
  faults.raise_if_any();
  return config;
}

void print_config(const RunConfig& config) { std::fputs(core::config::dump(config).c_str(), stdout); }

}  // namespace longstraw::app
