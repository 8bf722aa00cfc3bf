#pragma once
// Loading, dumping, comparing and explaining a configuration, all from its field lists (fields.h).
//
//   auto config = load<RunConfig>({.file = "run.yaml", .overrides = {"objective.beta=0.04"}});
//
// A configuration is a YAML file of nested sections. Keys that are missing keep their defaults; a key that is unknown
// or occurs twice is a fault. All faults are reported at once, in a ConfigError, one line each:
//
//   configuration: 2 faults
//     run.yaml:12: longstraw.segment_tokens: got 0, wanted an integer >= 1
//     --set objective.lsos_type=grpo: objective.lsos_type: unknown key; did you mean objective.loss_type?
//
// Paths inside a configuration are relative to the working directory, in a file as on the command line.

#include "core/config/binding.h"
#include "core/config/faults.h"

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::core::config {

struct Sources {
  std::optional<std::filesystem::path> file;
  std::vector<std::string> overrides;  // key.path=value, value in YAML; later ones win
};

struct Difference {
  std::string key;
  std::string first;  // as YAML
  std::string second;
  bool operator==(const Difference&) const = default;
};

// The untyped halves of the functions below.
void apply_file(const std::filesystem::path& file, std::vector<Binding>& bindings, Faults& faults);
void apply_text(const std::string& yaml, const std::string& label, std::vector<Binding>& bindings, Faults& faults);
void apply_override(const std::string& override_text, std::vector<Binding>& bindings, Faults& faults);
std::string dump(const std::vector<Binding>& bindings);
std::string help(const std::vector<Binding>& bindings);
std::vector<Difference> diff(const std::vector<Binding>& first, const std::vector<Binding>& second);

// A struct may have `void check(Faults&) const` for rules across its fields.
template <class C>
void check_across_fields(const C& config, Faults& faults) {
  if constexpr (requires { config.check(faults); }) config.check(faults);
}

template <Section C>
C load(const Sources& sources) {
  C config;
  Faults faults;
  std::vector<Binding> bindings = bind(config);
  if (sources.file) apply_file(*sources.file, bindings, faults);
  for (const std::string& text : sources.overrides) apply_override(text, bindings, faults);
  check_across_fields(config, faults);
  faults.raise_if_any();
  return config;
}

// From a text, for example the `config` attribute of a record; `label` names it in messages.
template <Section C>
C load_text(const std::string& yaml, const std::string& label) {
  C config;
  Faults faults;
  std::vector<Binding> bindings = bind(config);
  apply_text(yaml, label, bindings, faults);
  check_across_fields(config, faults);
  faults.raise_if_any();
  return config;
}

// Every key with its value; load_text(dump(config)) == config.
template <Section C>
std::string dump(C config) {
  return dump(bind(config));
}

// Every key with its default, its meaning and what it accepts, as YAML that loads to the defaults.
template <Section C>
std::string help() {
  C defaults;
  return help(bind(defaults));
}

// The keys whose values differ, in the order of the field lists.
template <Section C>
std::vector<Difference> diff(C first, C second) {
  return diff(bind(first), bind(second));
}

}  // namespace longstraw::core::config
