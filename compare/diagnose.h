#pragma once
// The likely cause of a deviation, by name and with evidence. Each known fault leaves a pattern in the two records; a
// deviation within the bounds is given no name. docs/comparator.md lists names and patterns.

#include <string>
#include <vector>

#include "compare/bounds.h"
#include "compare/measure.h"

namespace longstraw::compare {

struct Finding {
  std::string name;                     // wrong_sign, zeroed_layer, ...: stable, for programs
  std::string evidence;                 // one sentence with numbers, for people
  std::vector<std::string> parameters;  // what it explains; empty when it is not about single parameters

  bool operator==(const Finding&) const = default;
};

struct DiagnosisInput {
  const core::record::RecordReader& reference;
  const core::record::RecordReader& candidate;
  const StepMeasure& measure;
  const Bounds& bounds;
};

// Findings in order of how much they explain. A parameter is explained once. A deviation that fits no pattern is
// `unexplained`.
std::vector<Finding> diagnose(const DiagnosisInput& input);

}  // namespace longstraw::compare
