#include "training/local_sampler.h"

#include <algorithm>
#include <utility>

namespace longstraw::training {

LocalSampler::LocalSampler(const core::model::Decoder& decoder, LocalSamplerOptions options)
    : decoder_(decoder), options_(std::move(options)) {}

RolloutGroup LocalSampler::sample(const EncodedPrompt& prompt, const core::data::RolloutConfig& rollout, uint64_t stream) {
  const auto tokens = int64_t(prompt.ids.size());
  RolloutGroup sampled;
  sampled.captured =
      std::make_unique<CapturedPrompt>(decoder_, prompt.ids,
                                       CaptureOptions{.longstraw = options_.capture,
                                                      .lengths = {tokens + 1, tokens + rollout.max_completion_length},
                                                      .allow_stale = options_.allow_stale,
                                                      .graph_budget = options_.graph_budget,
                                                      .progress = options_.progress});
  auto responses = sampled.captured->sample(stream, {.rollout = rollout,
                                                     .stop_token_ids = options_.stop_token_ids,
                                                     .segment_tokens = options_.capture.segment_tokens,
                                                     .progress = {}});
  sampled.group.prompt_id = prompt.row->prompt_id;
  sampled.group.prompt_ids = prompt.ids;
  for (auto& response : responses) {
    sampled.group.responses.emplace_back().completion_ids = std::move(response.completion_ids);
    sampled.truncated.push_back(response.truncated ? 1 : 0);
  }
  return sampled;
}

std::vector<int64_t> stop_token_ids(const core::data::RolloutConfig& rollout, const core::model::Decoder& decoder) {
  return rollout.stop_token_ids ? *rollout.stop_token_ids : decoder.architecture().eos_ids;
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
