#include "training/generation.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

namespace longstraw::training {
namespace {

using core::data::Batch;
using core::data::Response;
using core::model::TokenScores;
using core::objective::KlPlace;
using core::objective::SamplerCorrection;

bool equal_rewards(const core::data::PromptGroup& group) {
  std::set<double> rewards;
  for (const auto& response : group.responses) {
    if (response.reward) rewards.insert(*response.reward);
  }
  return rewards.size() <= 1;
}

// DAPO's soft punishment of a response of `length` tokens.
double overlong_penalty(int64_t length, int64_t longest, int64_t cache) {
  if (length <= longest - cache) return 0.0;
  if (length > longest) return -1.0;
  return double(longest - cache - length) / double(cache);
}

using Column = std::optional<std::vector<double>> Response::*;

bool all_have(const Batch& batch, Column column) {
  return std::all_of(batch.begin(), batch.end(), [&](const auto& group) {
    return std::all_of(group.responses.begin(), group.responses.end(), [&](const auto& r) { return (r.*column).has_value(); });
  });
}

// What the data set brought itself stays.
void fill(Batch& batch, Column column, const TokenScores& scores) {
  for (size_t g = 0; g < batch.size(); ++g) {
    for (size_t m = 0; m < batch[g].responses.size(); ++m) {
      auto& values = batch[g].responses[m].*column;
      if (!values) values = scores.logprobs[g][m];
    }
  }
}

Captured captured_of(const Generation& generation) {
  Captured captured;
  for (const auto& prompt : generation.captured) captured.push_back(prompt.get());
  return captured;
}

bool corrects_sampler(const Batch& batch, const core::objective::ObjectiveConfig& objective) {
  if (objective.importance_sampling_correction == SamplerCorrection::kNone) return false;
  return std::any_of(batch.begin(), batch.end(), [](const auto& group) {
    return std::any_of(group.responses.begin(), group.responses.end(),
                       [](const auto& r) { return r.sampling_logprobs.has_value(); });
  });
}

}  // namespace

int64_t steps_of_generation(const TrainConfig& train) { return train.steps_per_generation * train.num_iterations; }

Generation GenerationMaker::make(DataPosition& at) const {
  Generation generation;
  SampledGroups sampled = collect(at, generation);
  for (auto& group : sampled.groups) {
    generation.batch.push_back(std::move(group.group));
    generation.truncated.push_back(std::move(group.truncated));
    generation.captured.push_back(policy.serves_gradient() ? std::move(group.captured) : nullptr);
  }
  add_log_probs(generation);
  const auto advantages = policy.advantages(generation.batch);
  for (size_t g = 0; g < generation.batch.size(); ++g) {
    auto& responses = generation.batch[g].responses;
    for (size_t m = 0; m < responses.size(); ++m) responses[m].advantage = advantages[g][m];
  }
  return generation;
}

SampledGroups GenerationMaker::collect(DataPosition& at, Generation& generation) const {
  const TrainConfig& train = settings.train;
  int64_t held_bytes = policy.serves_gradient() ? int64_t(settings.longstraw.memory_budget) : 0;
  SampledGroups all;
  const int64_t tries = can_resample ? train.dynamic_sampling_tries : 0;
  for (int64_t attempt = 0; attempt <= tries; ++attempt) {
    const int64_t wanted = train.prompts_per_step - int64_t(all.groups.size());
    if (wanted == 0) break;
    SampledGroups more = source.next(wanted, at, held_bytes);
    shape_rewards(more);
    generation.sampled_prompt_tokens += more.prompt_tokens;
    generation.sampling_seconds += more.sampling_seconds;
    generation.reward_seconds += more.reward_seconds;
    for (auto& group : more.groups) {
      // The last try's groups stay whatever they are: a step has its number of responses.
      if (attempt < tries && equal_rewards(group.group)) {
        ++generation.dropped_groups;
        continue;
      }
      if (group.captured) held_bytes -= group.captured->held_bytes();
      all.groups.push_back(std::move(group));
    }
  }
  return all;
}

void GenerationMaker::shape_rewards(SampledGroups& sampled) const {
  const int64_t longest = settings.rollout.max_completion_length, cache = settings.train.soft_punish_cache;
  for (auto& group : sampled.groups) {
    for (size_t m = 0; m < group.group.responses.size(); ++m) {
      Response& response = group.group.responses[m];
      if (cache > 0) {
        const double penalty = overlong_penalty(int64_t(response.completion_ids.size()), longest, cache);
        if (response.reward) *response.reward += penalty;
        // No reward at all stays none: a penalty alone would be taken for one.
        if (!response.reward_parts.empty()) {
          response.reward_parts.push_back(response.reward ? std::optional(penalty) : std::nullopt);
        }
      }
      if (settings.train.mask_truncated_completions && group.truncated[m] != 0) {
        response.completion_mask = std::vector<uint8_t>(response.completion_ids.size(), 0);
      }
    }
  }
}

void GenerationMaker::add_log_probs(Generation& generation) const {
  const auto start = std::chrono::steady_clock::now();
  Batch& batch = generation.batch;
  // At the weights that sampled, and one step only, the ratio is 1 by definition.
  const bool needs_old = steps_of_generation(settings.train) > 1 || corrects_sampler(batch, objective) ||
                         (objective.beta > 0.0 && objective.kl_in == KlPlace::kReward);
  if (needs_old && !all_have(batch, &Response::old_logprobs)) {
    fill(batch, &Response::old_logprobs, policy.scores(decoder, batch, captured_of(generation)));
  }
  if (reference_model != nullptr && !all_have(batch, &Response::ref_logprobs)) {
    fill(batch, &Response::ref_logprobs, reference_model->scores(policy, batch));
  }
  generation.scoring_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

MiniBatch mini_batch(const Batch& batch, int64_t n, int64_t parts) {
  int64_t responses = 0;
  for (const auto& group : batch) responses += int64_t(group.responses.size());
  const int64_t begin = n * responses / parts, end = (n + 1) * responses / parts;
  MiniBatch part;
  int64_t at = 0;
  for (size_t g = 0; g < batch.size(); ++g) {
    const auto size = int64_t(batch[g].responses.size());
    const int64_t from = std::clamp(begin - at, int64_t{0}, size), to = std::clamp(end - at, int64_t{0}, size);
    at += size;
    if (from >= to) continue;
    part.groups.push_back(g);
    part.batch.push_back(
        {batch[g].prompt_id, batch[g].prompt_ids, {batch[g].responses.begin() + from, batch[g].responses.begin() + to}});
  }
  return part;
}

}  // namespace longstraw::training
