#pragma once
// The golden values of fixtures/objective/*.json (made by TRL's and verl's own functions), as batches and configurations of
// ours. fixtures/objective_cases.py says what a case holds.

#include "core/data/rollouts.h"
#include "core/model/step_gradient.h"
#include "core/objective/config.h"

#include <nlohmann/json.hpp>

namespace longstraw::test {

// fixtures/objective/trl.json: `published` values beside its cases.
const nlohmann::json& objective_golden();
// The cases of all files.
const std::vector<nlohmann::json>& objective_cases();
core::objective::ObjectiveConfig objective_config(const nlohmann::json& golden_objective);
// Rewards and their parts, masks, old, reference and sampler's log-probs of a case; token ids are all 0.
core::data::Batch objective_batch(const nlohmann::json& golden_case);
// Log-probs and entropies (0 where a case has none) of a case, as a scoring pass gives them.
core::model::TokenScores objective_scores(const nlohmann::json& golden_case);

}  // namespace longstraw::test
