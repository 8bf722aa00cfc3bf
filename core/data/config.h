#pragma once
// Sections `data` (rollouts read from a file, or prompts and a reward function) and `rollout` (how responses are sampled).

#include "core/config/fields.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::core::data {

// file.py:function; splits at the last colon.
constexpr bool is_reward_name(std::string_view text) {
  const auto colon = text.rfind(':');
  return colon != std::string_view::npos && colon > 0 && colon + 1 < text.size();
}

struct DataConfig {
  std::optional<std::string> rollouts;
  std::optional<std::string> prompts;
  std::optional<std::string> reward;
  double reward_timeout = 60.0;

  static constexpr auto fields() {
    using namespace config;
    using C = DataConfig;
    return std::tuple{
        field("rollouts", &C::rollouts, "JSONL of responses and their rewards (docs/rollouts.md); excludes prompts"),
        field("prompts", &C::prompts, "JSONL of prompts to sample responses for; needs reward"),
        field("reward", &C::reward, "reward function, f(prompts, completions, completion_ids, **columns) -> list",
              text_that(is_reward_name, "FILE.py:FUNCTION")),
        field("reward_timeout", &C::reward_timeout, "seconds the Python process may take for one answer", above(0)),
    };
  }
  bool operator==(const DataConfig&) const = default;
};

struct RolloutConfig {
  std::int64_t num_generations = 8;
  std::int64_t max_completion_length = 64;
  double temperature = 1.0;
  std::int64_t top_k = 0;
  double top_p = 1.0;
  std::uint64_t seed = 0;
  std::optional<std::vector<std::int64_t>> stop_token_ids;

  static constexpr auto fields() {
    using namespace config;
    using C = RolloutConfig;
    return std::tuple{
        field("num_generations", &C::num_generations, "responses a prompt: the size of a group", at_least(1)),
        field("max_completion_length", &C::max_completion_length, "longest response in tokens; also the divisor of dr_grpo",
              at_least(1)),
        field("temperature", &C::temperature, "divides the logits, when sampling and in every log-prob", above(0)),
        field("top_k", &C::top_k, "sample among the k likeliest tokens; 0: among all", at_least(0)),
        field("top_p", &C::top_p, "sample among the likeliest tokens that hold this share of probability", above_up_to(0, 1)),
        field("seed", &C::seed, "seed of the sampler"),
        field("stop_token_ids", &C::stop_token_ids, "tokens that end a response; null: those of the checkpoint", at_least(0)),
    };
  }
  bool operator==(const RolloutConfig&) const = default;
};

}  // namespace longstraw::core::data
