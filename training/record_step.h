#pragma once
// What a record (docs/record.md) keeps of one optimizer step.

#include "core/data/rollouts.h"
#include "core/model/decoder.h"
#include "core/model/step_gradient.h"
#include "core/record/writer.h"

#include <cstdint>
#include <string>
#include <vector>

namespace longstraw::training {

struct RecordedGradient {
  const core::model::Decoder& decoder;
  const core::data::Batch& batch;
  const core::model::StepGradient& result;
};

// Gradients, responses, objective, memory, timing and checks; the caller commits.
void write_step(core::record::StepWriter& out, const RecordedGradient& step);

// One row a response that has a reward; parts by `names`, those there are.
std::vector<core::record::RewardRow> reward_rows(const core::data::Batch& batch, int64_t step, const std::string& split,
                                                 const std::vector<std::string>& names);

}  // namespace longstraw::training
