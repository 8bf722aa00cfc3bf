#pragma once
// Where a step's responses come from: sampled here from the captured prompt state, from a running server, or from a file. And
// what is done with them before there is a loss: rewards, penalties, masks.

#include "core/data/config.h"
#include "core/data/prompts.h"
#include "core/data/rollouts.h"
#include "core/model/decoder.h"
#include "longstraw/captured_prompt.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace longstraw::training {

// One prompt with its responses, scored; `captured` where it was sampled here and its state may serve training too.
struct RolloutGroup {
  core::data::PromptGroup group;
  std::vector<std::string> completions;  // texts, empty without a tokenizer
  std::vector<uint8_t> truncated;        // by member: cut off at max_completion_length
  std::unique_ptr<CapturedPrompt> captured;
};

// A prompt of the data set in tokens, after the policy for long ones.
struct EncodedPrompt {
  const core::data::PromptRow* row = nullptr;
  std::vector<int64_t> ids;
};

// Samples without scoring. `stream` tells draws of one seed apart: the same stream gives the same responses, whenever it is asked
// for.
class Sampler {
 public:
  virtual ~Sampler() = default;
  virtual RolloutGroup sample(const EncodedPrompt& prompt, const core::data::RolloutConfig& rollout, uint64_t stream) = 0;
  // The weights have changed (step optimizer steps have been taken): a server is given them.
  virtual void weights_changed(int64_t step) {}
};

}  // namespace longstraw::training
