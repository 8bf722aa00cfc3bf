#include "training/rollout_source.h"

#include "training/local_sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace longstraw::training {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void decode(std::vector<RolloutGroup>& groups, core::data::ScoringProcess* tokenizer) {
  std::vector<std::vector<int64_t>> ids;
  for (const auto& group : groups) {
    for (const auto& response : group.group.responses) ids.push_back(response.completion_ids);
  }
  std::vector<std::string> texts = tokenizer != nullptr ? tokenizer->decode(ids) : std::vector<std::string>(ids.size());
  size_t next = 0;
  for (auto& group : groups) {
    for (size_t m = 0; m < group.group.responses.size(); ++m) group.completions.push_back(std::move(texts[next++]));
  }
}

void score(std::vector<RolloutGroup>& groups, const std::vector<Draw>& draws, const SamplingParts& parts) {
  std::vector<core::data::ScoredCompletion> scored;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t m = 0; m < groups[g].completions.size(); ++m) {
      scored.push_back({draws[g].prompt->row, groups[g].completions[m], groups[g].group.responses[m].completion_ids});
    }
  }
  auto rewards = parts.rewards->score(scored);
  size_t next = 0;
  for (auto& group : groups) {
    for (auto& response : group.group.responses) {
      response.reward = core::data::weighted_reward(rewards[next], parts.reward_weights);
      response.reward_parts = std::move(rewards[next++]);
    }
  }
}

}  // namespace

SampledGroups sample_scored(const std::vector<Draw>& draws, const core::data::RolloutConfig& rollout, int64_t held_bytes,
                            const SamplingParts& parts) {
  SampledGroups sampled;
  auto start = Clock::now();
  for (const Draw& draw : draws) {
    if (parts.progress) parts.progress(fmt::format("sampling, prompt {} of {}", sampled.groups.size() + 1, draws.size()));
    RolloutGroup group = parts.sampler->sample(*draw.prompt, rollout, draw.stream);
    if (group.captured) {
      sampled.prompt_tokens += group.captured->captured_tokens();
      const int64_t bytes = group.captured->held_bytes();
      if (bytes > held_bytes) {
        group.captured.reset();
      } else {
        held_bytes -= bytes;
      }
    }
    sampled.groups.push_back(std::move(group));
  }
  sampled.sampling_seconds = seconds_since(start);
  start = Clock::now();
  if (parts.progress) parts.progress("rewards");
  decode(sampled.groups, parts.tokenizer);
  if (parts.rewards != nullptr) score(sampled.groups, draws, parts);
  sampled.reward_seconds = seconds_since(start);
  return sampled;
}

PromptSource::PromptSource(PromptSet prompts, core::data::RolloutConfig rollout, uint64_t seed, bool shuffle, SamplingParts parts)
    : prompts_(std::move(prompts)),
      rollout_(std::move(rollout)),
      seed_(seed),
      order_(prompts_.size(), seed, shuffle),
      parts_(std::move(parts)) {}

SampledGroups PromptSource::next(int64_t count, DataPosition& at, int64_t held_bytes) {
  std::vector<Draw> draws;
  for (int64_t n = 0; n < count; ++n) {
    const uint64_t drawn = uint64_t(order_.count(at));
    draws.push_back({&prompts_[order_.take(at)], mixed(seed_, drawn)});
  }
  return sample_scored(draws, rollout_, held_bytes, parts_);
}

FileSource::FileSource(core::data::Batch batch, std::vector<int64_t> stop_token_ids, int64_t max_completion_length)
    : batch_(std::move(batch)),
      stop_token_ids_(std::move(stop_token_ids)),
      max_completion_length_(max_completion_length),
      order_(int64_t(batch_.size()), 0, /*shuffle=*/false) {}

int64_t FileSource::longest_prompt() const {
  size_t longest = 0;
  for (const auto& group : batch_) longest = std::max(longest, group.prompt_ids.size());
  return int64_t(longest);
}

SampledGroups FileSource::next(int64_t count, DataPosition& at, int64_t) {
  SampledGroups read;
  for (int64_t n = 0; n < count; ++n) {
    RolloutGroup& group = read.groups.emplace_back();
    group.group = batch_[size_t(order_.take(at))];
    group.truncated = truncated_members(group.group, stop_token_ids_, max_completion_length_);
  }
  return read;
}

}  // namespace longstraw::training
