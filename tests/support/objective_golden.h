#pragma once
// The golden values of fixtures/objective/trl.json (made by TRL's own trainer), as batches and configurations of ours.

#include "core/data/rollouts.h"
#include "core/objective/config.h"

#include <nlohmann/json.hpp>

namespace longstraw::test {

const nlohmann::json& objective_golden();
core::objective::ObjectiveConfig objective_config(const nlohmann::json& golden_objective);
// Rewards, masks, old and reference log-probs of a case; token ids are all 0.
core::data::Batch objective_batch(const nlohmann::json& golden_case);

}  // namespace longstraw::test
