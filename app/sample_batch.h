#pragma once
// Responses sampled from the prompts that data.prompts names, and scored by the functions that data.reward names.

#include "app/config.h"
#include "app/progress.h"

#include "core/data/prompts.h"
#include "core/data/reward_process.h"
#include "core/data/rewards.h"
#include "core/data/rollouts.h"
#include "core/model/decoder.h"

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace longstraw::app {

struct SampledGroup {
  core::data::PromptGroup group;
  nlohmann::json prompt;                 // as the prompts file has it: text, messages or null
  std::vector<std::string> completions;  // decoded; empty texts when the checkpoint has no tokenizer
};

class PromptSampler {
 public:
  // Reads the prompts, starts the Python processes and looks the reward functions up: faults in them cost no sampling.
  // Without data.reward responses stay unscored. Throws as read_prompts, ScoringProcess and RewardFunctions do.
  PromptSampler(const RunConfig& config, Progress& progress);

  size_t prompts() const { return rows_.size(); }
  const std::string& prompt_id(size_t row) const { return rows_.at(row).prompt_id; }
  // A row's prompt in tokens. FormatError for none, and for ids outside the vocabulary.
  std::vector<int64_t> encode(const core::model::Decoder& decoder, size_t row);
  // A row's responses do not depend on which other rows are sampled. Throws as encode does.
  SampledGroup sample(const core::model::Decoder& decoder, size_t row);
  // The same behind other tokens than the row's own prompt, and with other settings than the configuration's.
  SampledGroup sample(const core::model::Decoder& decoder, size_t row, std::vector<int64_t> prompt_ids,
                      const core::data::RolloutConfig& rollout);

 private:
  void score(const core::data::PromptRow& row, SampledGroup& sampled);

  const RunConfig& config_;
  Progress& progress_;
  std::vector<core::data::PromptRow> rows_;
  bool has_tokenizer_ = false;
  std::unique_ptr<core::data::ScoringProcess> tokenizer_;  // null: the checkpoint has none
  std::unique_ptr<core::data::RewardFunctions> rewards_;   // null: nothing is scored
  std::vector<double> reward_weights_;
};

// A rollouts file (docs/rollouts.md), a line a response, with the texts as the columns prompt and completion. Whole or
// not at all; read_rollouts gives the same groups back.
void write_sampled(const std::filesystem::path& path, const std::vector<SampledGroup>& groups);

}  // namespace longstraw::app
