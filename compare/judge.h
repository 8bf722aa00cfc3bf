#pragma once
// Policy: which measurements must be within which bounds. Every check is written as a pass, `measured <= bound`, so that a NaN
// fails.

#include <optional>
#include <string>
#include <vector>

#include "compare/bounds.h"

namespace longstraw::compare {

struct Check {
  std::string what;  // "relative L2 over all parameters"
  double measured = 0;
  double bound = 0;
  std::string reason;     // why this bound
  std::string parameter;  // the parameter that decides it; empty for the whole model
  bool pass = false;
};

struct Judgement {
  std::vector<Check> checks;
  std::optional<double> noise_floor;  // the reference's relative L2 from the noise record
  bool pass() const;
};

// `noise` may be null.
Judgement judge(const StepMeasure& measure, const NoiseMeasure* noise, const Bounds& bounds);

}  // namespace longstraw::compare
