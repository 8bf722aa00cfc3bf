#include "longstraw/sampler.h"

#include "longstraw/captured_prompt.h"

namespace longstraw {

std::vector<SampledResponse> sample_group(const core::model::Decoder& decoder, const std::vector<int64_t>& prompt_ids,
                                          uint64_t stream, const SamplerOptions& options) {
  const auto prompt = static_cast<int64_t>(prompt_ids.size());
  const CapturedPrompt captured(
      decoder, prompt_ids,
      {.longstraw = {.prompt_gradient = PromptGradient::kDetached, .segment_tokens = options.segment_tokens},
       .lengths = {prompt + 1, prompt + options.rollout.max_completion_length}});
  return captured.sample(stream, options);
}

}  // namespace longstraw
