#include "longstraw/step_trace.h"

#include <algorithm>

namespace longstraw {

std::unique_ptr<core::model::Execution> StepTracer::around(core::model::Execution& execution, const ForwardPass& pass) {
  if (pass.branches.empty()) return nullptr;
  Pass& traced = passes_.emplace_back();
  const auto& spans = pass.options.spans;
  for (size_t i = 0; i < spans.size(); ++i) {
    const Branch& branch = *pass.branches.at(i);
    traced.rows.push_back({branch.prompt, branch.member, branch.first_target, spans[i].begin, spans[i].end - spans[i].begin});
  }
  return std::make_unique<core::model::TracedExecution>(execution, traced.points, 0, spans.back().end);
}

std::vector<std::vector<core::model::Trace>> StepTracer::traces(const core::data::Batch& batch) const {
  std::vector<std::vector<core::model::Trace>> traces;
  for (const auto& group : batch) traces.emplace_back(group.responses.size());
  for (const Pass& pass : passes_) {
    for (const Rows& rows : pass.rows) {
      const size_t tokens = batch[rows.prompt].responses[rows.member].completion_ids.size();
      for (const auto& [point, numbers] : pass.points.trace(rows.begin, rows.count)) {
        auto& all = traces[rows.prompt][rows.member][point];
        all.resize(tokens);
        std::copy(numbers.begin(), numbers.end(), all.begin() + rows.first_target);
      }
    }
  }
  return traces;
}

}  // namespace longstraw
