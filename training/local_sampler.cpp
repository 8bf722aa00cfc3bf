#include "training/local_sampler.h"

#include "longstraw/sampler.h"

#include <algorithm>
#include <utility>

namespace longstraw::training {

LocalSampler::LocalSampler(const core::model::Decoder& decoder, LocalSamplerOptions options)
    : decoder_(decoder), options_(std::move(options)) {}

RolloutGroup LocalSampler::sample(const EncodedPrompt& prompt, const core::data::RolloutConfig& rollout, uint64_t stream) {
  core::data::RolloutConfig config = rollout;
  if (config.temperature == 0.0) {
    config.temperature = 1.0;
    config.top_k = 1;
  }
  auto responses = sample_group(decoder_, prompt.ids, stream,
                                {.rollout = config,
                                 .stop_token_ids = options_.stop_token_ids,
                                 .segment_tokens = options_.capture.segment_tokens,
                                 .progress = options_.progress});
  RolloutGroup sampled;
  sampled.group.prompt_id = prompt.row->prompt_id;
  sampled.group.prompt_ids = prompt.ids;
  for (auto& response : responses) {
    sampled.group.responses.emplace_back().completion_ids = std::move(response.completion_ids);
  }
  sampled.truncated = truncated_members(sampled.group, options_.stop_token_ids, rollout.max_completion_length);
  return sampled;
}

std::vector<uint8_t> truncated_members(const core::data::PromptGroup& group, const std::vector<int64_t>& stop_token_ids,
                                       int64_t max_completion_length) {
  std::vector<uint8_t> truncated;
  for (const auto& response : group.responses) {
    const auto& ids = response.completion_ids;
    const bool stopped = std::count(stop_token_ids.begin(), stop_token_ids.end(), ids.back()) > 0;
    truncated.push_back(!stopped && int64_t(ids.size()) >= max_completion_length ? 1 : 0);
  }
  return truncated;
}

}  // namespace longstraw::training
