#pragma once
// Rewards of held-out prompts at the weights of the moment.

#include "training/metrics.h"
#include "training/prompt_set.h"
#include "training/rollout_source.h"

#include <string>
#include <vector>

namespace longstraw::training {

struct Evaluation {
  core::data::Batch batch;  // scored
  Metrics metrics;          // eval_reward, eval_completions/mean_length, …: TRL's names behind eval_
};

// Draws depend on `seed` and the prompt alone: every evaluation of a run asks the same.
Evaluation evaluate(const PromptSet& prompts, const core::data::RolloutConfig& rollout, uint64_t seed, const SamplingParts& parts,
                    const std::vector<std::string>& reward_names);

}  // namespace longstraw::training
