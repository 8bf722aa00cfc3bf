#include "core/config/faults.h"

#include "core/base/errors.h"

#include <algorithm>

namespace longstraw::core::config {

void Faults::add(std::string where, std::string key, std::string problem) {
  faults_.push_back({std::move(where), std::move(key), std::move(problem)});
}

bool Faults::at(std::initializer_list<std::string_view> keys) const {
  return std::any_of(faults_.begin(), faults_.end(), [&](const Fault& fault) {
    return std::any_of(keys.begin(), keys.end(), [&](std::string_view key) {
      // A fault at a section as a whole leaves all its keys at their defaults.
      return fault.key == key || (key.starts_with(fault.key + ".") && !fault.key.empty());
    });
  });
}

std::string Faults::message() const {
  std::string text;
  if (faults_.size() > 1) text = "configuration: " + std::to_string(faults_.size()) + " faults";
  for (const Fault& fault : faults_) {
    if (!text.empty()) text += "\n  ";
    text += fault.where.empty() ? "configuration" : fault.where;
    if (!fault.key.empty()) text += ": " + fault.key;
    text += ": " + fault.problem;
  }
  return text;
}

void Faults::raise_if_any() const {
  if (!empty()) throw ConfigError(message());
}

}  // namespace longstraw::core::config
