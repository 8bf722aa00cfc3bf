#pragma once
// Samples with the weights that are trained: each prompt runs forward once, its members decode from the state that leaves.

#include "training/rollout.h"

#include <functional>
#include <vector>

namespace longstraw::training {

struct LocalSamplerOptions {
  LongstrawConfig capture;  // so that the captured state serves the arm's gradient too
  bool allow_stale = false;
  int64_t graph_budget = 0;  // of each prompt (CaptureOptions)
  std::vector<int64_t> stop_token_ids;
  std::function<void(int64_t tokens)> progress;
};

class LocalSampler final : public Sampler {
 public:
  LocalSampler(const core::model::Decoder& decoder, LocalSamplerOptions options);
  // Without sampling_logprobs: they are the trainer's own up to rounding, so there is nothing to correct.
  RolloutGroup sample(const EncodedPrompt& prompt, const core::data::RolloutConfig& rollout, uint64_t stream) override;

 private:
  const core::model::Decoder& decoder_;
  LocalSamplerOptions options_;
};

// The tokens that end a response: those of the configuration, else the checkpoint's.
std::vector<int64_t> stop_token_ids(const core::data::RolloutConfig& rollout, const core::model::Decoder& decoder);

// By member: no stop token ended it within `max_completion_length`.
std::vector<uint8_t> truncated_members(const core::data::PromptGroup& group, const std::vector<int64_t>& stop_token_ids,
                                       int64_t max_completion_length);

}  // namespace longstraw::training
