#pragma once
// What a run trains on and is scored by: read and checked before any weight is.

#include "core/data/reward_process.h"
#include "core/data/rewards.h"
#include "core/data/rollouts.h"
#include "training/prompt_set.h"
#include "training/settings.h"

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::training {

struct Data {
  std::unique_ptr<core::data::ScoringProcess> tokenizer;  // null: the checkpoint has none, or nothing is sampled
  std::unique_ptr<core::data::RewardFunctions> rewards;   // null: none are named
  std::vector<std::string> reward_names;                  // with the overlong penalty, where there is one
  std::vector<double> reward_weights;                     // of data.reward alone
  std::optional<PromptSet> prompts;                       // one of the two
  std::optional<core::data::Batch> rollouts;
  std::optional<PromptSet> eval_prompts;
  core::objective::ObjectiveConfig objective;  // the penalty's weight is among reward_weights
};

// ConfigError and FormatError for what can't be used; reward functions are looked up too.
Data read_data(const Settings& settings, const Hooks& hooks);

}  // namespace longstraw::training
