#pragma once
// Responses sampled from a prompt that is run once: all members of a group read the same captured prompt state and decode
// in lockstep. Temperature 0 takes the likeliest token; log-probs are then those of the untempered distribution.

#include "core/data/config.h"
#include "core/model/decoder.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace longstraw {

struct SampledResponse {
  std::vector<int64_t> completion_ids;    // with the stop token that ended it, if one did
  std::vector<double> sampling_logprobs;  // of the logits divided by the temperature, before top_k and top_p
  bool truncated = true;                  // no stop token within max_completion_length
};

struct SamplerOptions {
  core::data::RolloutConfig rollout;
  std::vector<int64_t> stop_token_ids;  // resolved: the checkpoint's unless the config names others
  int64_t segment_tokens = 2048;        // of the prompt's forward pass
  std::function<void(int64_t tokens)> progress;
};

// num_generations responses. `stream` tells apart the prompts of one seed: the same (seed, stream) gives the same
// responses on one device and thread count, whatever other prompts are sampled. Captures the prompt and lets go of it; whoever
// trains on the responses too keeps a CapturedPrompt (captured_prompt.h) and samples from that.
std::vector<SampledResponse> sample_group(const core::model::Decoder& decoder, const std::vector<int64_t>& prompt_ids,
                                          uint64_t stream, const SamplerOptions& options);

}  // namespace longstraw
