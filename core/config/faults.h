#pragma once
// All that is wrong with a configuration, gathered so that it is reported at once.

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::core::config {

struct Fault {
  std::string where;    // "run.yaml:12", "--set", or "" for a rule across fields
  std::string key;      // "objective.epsilon"; "" for the file as a whole
  std::string problem;  // "got -1, wanted a number >= 0"
};

class Faults {
 public:
  void add(std::string where, std::string key, std::string problem);
  // A rule across fields is broken. `key` names the field to change.
  void add(std::string key, std::string problem) { add("", std::move(key), std::move(problem)); }

  bool empty() const { return faults_.empty(); }
  const std::vector<Fault>& list() const { return faults_; }
  // Is a fault already known at one of `keys`? Rules across fields skip such keys: their values are defaults.
  bool at(std::initializer_list<std::string_view> keys) const;
  // One line a fault. Throws ConfigError with it unless empty.
  std::string message() const;
  void raise_if_any() const;

 private:
  std::vector<Fault> faults_;
};

}  // namespace longstraw::core::config
