#pragma once
// A random optimizer step: responses with all columns, and scores at the step's weights.

#include "core/data/rollouts.h"
#include "core/model/step_gradient.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <string>

namespace longstraw::test {

struct Step {
  core::data::Batch batch;
  core::model::TokenScores scores;
};

struct StepOptions {
  int prompts = 2, members = 3;
  bool old = true, given_advantages = false;
  double spread = 0.5;  // of old log-probs around the current ones
  int parts = 0;        // rewards of each response; some are missing
};

// Multiples of 1/1024, so that a ratio hardly ever meets a clip boundary.
inline Step random_step(uint64_t seed, const StepOptions& options) {
  std::mt19937_64 random(seed);
  const auto draw = [&](double low, double high) {
    return std::uniform_int_distribution<int>(int(low * 1024), int(high * 1024))(random) / 1024.0;
  };
  Step step;
  for (int p = 0; p < options.prompts; ++p) {
    auto& group = step.batch.emplace_back();
    group.prompt_id = std::to_string(p);
    group.prompt_ids = {0};
    step.scores.logprobs.emplace_back();
    step.scores.entropies.emplace_back();
    for (int m = 0; m < options.members; ++m) {
      const auto length = std::uniform_int_distribution<size_t>(1, 5)(random);
      core::data::Response response{.completion_ids = std::vector<int64_t>(length, 0), .reward = draw(-2, 2)};
      if (options.given_advantages) response.advantage = draw(-2, 2);
      for (int k = 0; k < options.parts; ++k) {
        response.reward_parts.push_back(draw(0, 1) < 0.2 ? std::nullopt : std::optional(draw(-2, 2)));
      }
      // `reward` is the parts' sum: none where there is no part.
      const auto is_there = [](const std::optional<double>& part) { return part.has_value(); };
      if (options.parts > 0 && std::none_of(response.reward_parts.begin(), response.reward_parts.end(), is_there)) {
        response.reward.reset();
      }
      std::vector<double> logprobs, entropies, old, ref, sampling;
      std::vector<uint8_t> mask;
      for (size_t t = 0; t < length; ++t) {
        logprobs.push_back(draw(-4, -0.1));
        entropies.push_back(draw(0, 3));
        old.push_back(logprobs[t] + draw(-options.spread, options.spread));
        ref.push_back(logprobs[t] + draw(-1, 1));
        sampling.push_back(old[t] + draw(-0.4, 0.4));
        mask.push_back(t == 0 || draw(0, 1) > 0.2 ? 1 : 0);
      }
      if (options.old) response.old_logprobs = old;
      response.ref_logprobs = ref;
      response.sampling_logprobs = sampling;
      response.completion_mask = mask;
      group.responses.push_back(std::move(response));
      step.scores.logprobs[p].push_back(logprobs);
      step.scores.entropies[p].push_back(entropies);
    }
  }
  return step;
}

}  // namespace longstraw::test
