#pragma once
// The trace of a step (core/model/traced_execution.h): of every response, the numbers of the passes that predict it.

#include "longstraw/sweep.h"

#include "core/data/rollouts.h"
#include "core/model/traced_execution.h"

#include <deque>
#include <memory>
#include <vector>

namespace longstraw {

class StepTracer {
 public:
  // For SweepOptions::around: traces a pass that predicts something; null for another. Must outlive what it returns.
  std::unique_ptr<core::model::Execution> around(core::model::Execution& execution, const ForwardPass& pass);
  // [prompt][member], a number a token of the response.
  std::vector<std::vector<core::model::Trace>> traces(const core::data::Batch& batch) const;

 private:
  struct Rows {  // of a pass, which predict tokens [first_target, first_target + count) of a response
    int64_t prompt, member, first_target, begin, count;
  };
  struct Pass {
    std::vector<Rows> rows;
    core::model::TracePoints points;
  };
  std::deque<Pass> passes_;  // whose elements stay where they are
};

}  // namespace longstraw
