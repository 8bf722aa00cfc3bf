#pragma once
// Groups of responses, with their rewards, in the order of the data set: sampled from prompts, or read from a rollouts file.

#include "core/data/reward_process.h"
#include "core/data/rewards.h"
#include "training/data_order.h"
#include "training/prompt_set.h"
#include "training/rollout.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace longstraw::training {

// What sampling, decoding and rewarding need, for training and for evaluation.
struct SamplingParts {
  Sampler* sampler = nullptr;
  core::data::ScoringProcess* tokenizer = nullptr;  // null: completions have no text
  core::data::RewardFunctions* rewards = nullptr;   // null: nothing is scored
  std::vector<double> reward_weights;
  std::function<void(std::string_view where)> progress;
};

struct Draw {
  const EncodedPrompt* prompt = nullptr;
  uint64_t stream = 0;
};

struct SampledGroups {
  std::vector<RolloutGroup> groups;
  int64_t prompt_tokens = 0;  // run forward for them
  double sampling_seconds = 0.0, reward_seconds = 0.0;
};

// One group a draw. Captured prompts are kept as long as they fit `held_bytes` together. The reward functions are called once, with
// all completions. Throws as the sampler and the reward functions do.
SampledGroups sample_scored(const std::vector<Draw>& draws, const core::data::RolloutConfig& rollout, int64_t held_bytes,
                            const SamplingParts& parts);

class RolloutSource {
 public:
  virtual ~RolloutSource() = default;
  virtual int64_t rows() const = 0;
  virtual int64_t longest_prompt() const = 0;
  virtual std::string data_sha256() const = 0;
  // The next `count` groups; `at` moves on.
  virtual SampledGroups next(int64_t count, DataPosition& at, int64_t held_bytes) = 0;
};

class PromptSource final : public RolloutSource {
 public:
  PromptSource(PromptSet prompts, core::data::RolloutConfig rollout, uint64_t seed, bool shuffle, SamplingParts parts);
  int64_t rows() const override { return prompts_.size(); }
  int64_t longest_prompt() const override { return prompts_.longest(); }
  std::string data_sha256() const override { return prompts_.sha256(); }
  SampledGroups next(int64_t count, DataPosition& at, int64_t held_bytes) override;

 private:
  PromptSet prompts_;
  core::data::RolloutConfig rollout_;
  uint64_t seed_;
  DataOrder order_;
  SamplingParts parts_;
};

// Groups of a file, in its order.
class FileSource final : public RolloutSource {
 public:
  FileSource(core::data::Batch batch, std::vector<int64_t> stop_token_ids, int64_t max_completion_length);
  int64_t rows() const override { return int64_t(batch_.size()); }
  int64_t longest_prompt() const override;
  std::string data_sha256() const override { return core::data::data_sha256(batch_); }
  SampledGroups next(int64_t count, DataPosition& at, int64_t held_bytes) override;

 private:
  core::data::Batch batch_;
  std::vector<int64_t> stop_token_ids_;
  int64_t max_completion_length_;
  DataOrder order_;
};

}  // namespace longstraw::training
