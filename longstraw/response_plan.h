#pragma once
// What is known of each response before it runs: weights, masks, and the policy losses that its tokens share.

#include "longstraw/objective.h"

#include <cstdint>
#include <vector>

namespace longstraw {

struct PlanInputs {
  const core::data::Batch& batch;
  const core::objective::ObjectiveConfig& config;
  int64_t max_completion_length;
  const core::model::TokenScores& scores;
  const std::vector<std::vector<double>>& advantages;  // [prompt][member]
};

// [prompt][member]
std::vector<std::vector<GrpoObjective::ResponsePlan>> plan_responses(const PlanInputs& inputs);

}  // namespace longstraw
