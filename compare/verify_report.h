#pragma once
// The report of `longstraw verify`: every arm of one batch against the reference. report.json is a contract
// (docs/comparator.md); everything in it is read from the records.

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "compare/report.h"

namespace longstraw::compare {

struct VerifyInputs {
  std::string reference;                                  // path of the reference arm's record
  std::vector<std::pair<std::string, std::string>> arms;  // name and path, in the order of the report
  std::optional<std::string> noise;                       // path of the reference arm in a wider dtype
  CompareConfig config;
};

struct BatchFacts {
  std::int64_t prompts = 0;
  std::vector<std::int64_t> prompt_tokens;    // of each prompt
  std::int64_t group_size = 0;                // of the largest group
  std::vector<std::int64_t> response_tokens;  // of each response
};

// Over all steps: the highest peak, the sum of seconds, the last step's loss.
struct ArmFacts {
  std::int64_t peak_bytes = 0;
  std::map<std::string, double> seconds;
  std::optional<double> loss;
};

struct ArmReport {
  std::string name;
  ArmFacts facts;
  Report comparison;
};

struct VerifyReport {
  BatchFacts batch;
  ArmFacts reference;
  std::vector<ArmReport> arms;
  std::vector<std::string> gate;

  // All gated arms are within bounds; the others do not decide.
  bool pass() const;
  ExitStatus exit_status() const { return pass() ? ExitStatus::kWithinBounds : ExitStatus::kBeyondBounds; }
};

// ConfigError for an empty gate or one that names an arm that is not there; FormatError as compare_records.
VerifyReport verify_records(const VerifyInputs& inputs);
nlohmann::json verify_json(const VerifyReport& report);
// A table of the arms, then what each arm that is beyond its bounds loses, by kind and by layer, and why.
std::string verify_text(const VerifyReport& report);

}  // namespace longstraw::compare
