#pragma once
// One generation: the responses that the next optimizer steps train on, with all that their losses need.

#include "core/data/rollouts.h"
#include "training/policy.h"
#include "training/reference_model.h"
#include "training/rollout_source.h"
#include "training/settings.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace longstraw::training {

struct Generation {
  core::data::Batch batch;                                // advantages are set
  std::vector<std::vector<uint8_t>> truncated;            // [prompt][member]
  std::vector<std::unique_ptr<CapturedPrompt>> captured;  // [prompt], null where it has to be run again
  int64_t steps_done = 0;                                 // of its optimizer steps
  int64_t captured_at = 0;                                // optimizer steps that had been taken when it was sampled

  // Figures, once a generation.
  int64_t dropped_groups = 0;         // replaced, since all their rewards were equal
  int64_t sampled_prompt_tokens = 0;  // run forward for sampling
  double sampling_seconds = 0.0, reward_seconds = 0.0, scoring_seconds = 0.0;
};

// The name under which the overlong penalty is one of the rewards.
inline constexpr const char* kOverlongPenalty = "soft_overlong_punishment";

struct GenerationMaker {
  const Settings& settings;
  const core::objective::ObjectiveConfig& objective;
  const core::model::Decoder& decoder;
  const Policy& policy;
  RolloutSource& source;
  const ReferenceModel* reference_model;  // null: no KL term
  bool can_resample = false;              // dynamic sampling: the source samples anew

  // Takes prompts from `at` on.
  Generation make(DataPosition& at) const;

 private:
  SampledGroups collect(DataPosition& at, Generation& generation) const;
  void shape_rewards(SampledGroups& sampled) const;
  void add_log_probs(Generation& generation) const;
};

// Optimizer steps of one generation.
int64_t steps_of_generation(const TrainConfig& train);

// Responses [n·N/parts, (n+1)·N/parts) of the N, in order.
struct MiniBatch {
  core::data::Batch batch;
  std::vector<size_t> groups;  // which of the generation's
};
MiniBatch mini_batch(const core::data::Batch& batch, int64_t n, int64_t parts);

// A generation without its captured prompts, as a checkpoint keeps one that is not used up.
nlohmann::json to_json(const Generation& generation);
Generation generation_from_json(const nlohmann::json& json);

}  // namespace longstraw::training
