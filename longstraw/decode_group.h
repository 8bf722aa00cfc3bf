#pragma once
// All members of a group, decoded in lockstep from one prompt state.

#include "longstraw/prompt_state.h"
#include "longstraw/sampler.h"

#include "core/model/decoder.h"

#include <cstdint>
#include <vector>

namespace longstraw {

// A prompt that was run, all but its last token.
struct PromptToContinue {
  const core::model::Decoder& decoder;
  const PromptState& state;
  int64_t last_id = 0;
  int64_t past_tokens = 0;  // before the last one
  core::model::SequenceLengths lengths;
};

// options.segment_tokens is not read: the prompt was run already.
std::vector<SampledResponse> decode_group(const PromptToContinue& prompt, uint64_t stream, const SamplerOptions& options);

}  // namespace longstraw
