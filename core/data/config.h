#pragma once
// Sections `data` (rollouts read from a file, or prompts and a reward function) and `rollout` (how responses are sampled).

#include "core/config/fields.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::core::data {

// file.py:function (splits at the last colon), or command:PROGRAM ARGUMENTS.
constexpr bool is_reward_name(std::string_view text) {
  const auto colon = text.rfind(':');
  return colon != std::string_view::npos && colon > 0 && colon + 1 < text.size();
}

enum class RewardErrors { kStop, kNull };
constexpr auto names_of(RewardErrors) {
  using config::EnumName;
  return std::array{EnumName{RewardErrors::kStop, "stop"}, EnumName{RewardErrors::kNull, "null"}};
}

struct DataConfig {
  std::optional<std::string> rollouts;
  std::optional<std::string> prompts;
  std::optional<std::vector<std::string>> reward;
  double reward_timeout = 60.0;
  RewardErrors reward_errors = RewardErrors::kStop;

  static constexpr auto fields() {
    using namespace config;
    using C = DataConfig;
    return std::tuple{
        field("rollouts", &C::rollouts, "JSONL of responses and their rewards (docs/rollouts.md); excludes prompts"),
        field("prompts", &C::prompts, "JSONL (or, for train, Parquet) of prompts to sample responses for; needs reward"),
        field("reward", &C::reward,
              "reward functions, f(prompts, completions, completion_ids, **columns) -> list, or programs that answer JSON lines; "
              "one or a list",
              text_that(is_reward_name, "FILE.py:FUNCTION or command:PROGRAM ARGUMENTS")),
        field("reward_timeout", &C::reward_timeout, "seconds one answer of a reward function may take", above(0)),
        field("reward_errors", &C::reward_errors,
              "a reward function that raises, hangs or dies: stop the run, or count its rewards as missing and start it again"),
    };
  }
  bool operator==(const DataConfig&) const = default;
};

// An OpenAI-compatible server that samples instead of us.
struct ServerConfig {
  std::string url;
  std::string model = "policy";
  double timeout = 600.0;
  std::int64_t retries = 3;
  std::int64_t sync_steps = 1;
  std::string reload_path = "/update_weights_from_disk";

  static constexpr auto fields() {
    using namespace config;
    using C = ServerConfig;
    return std::tuple{
        field("url", &C::url, "address of the server, for example http://localhost:8000; empty: LongStraw samples itself"),
        field("model", &C::model, "name of the model in requests"),
        field("timeout", &C::timeout, "seconds one request may take", above(0)),
        field("retries", &C::retries, "times a failed request is sent again", at_least(0)),
        field("sync_steps", &C::sync_steps, "optimizer steps between two hand-overs of the weights", at_least(1)),
        field("reload_path", &C::reload_path,
              "path that is told of new weights by POST {\"model_path\": folder}; empty: the server is not told"),
    };
  }
  bool operator==(const ServerConfig&) const = default;
};

struct RolloutConfig {
  std::int64_t num_generations = 8;
  std::int64_t max_completion_length = 64;
  double temperature = 1.0;
  std::int64_t top_k = 0;
  double top_p = 1.0;
  std::uint64_t seed = 0;
  std::optional<std::vector<std::int64_t>> stop_token_ids;
  ServerConfig server;

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
        field("server", &C::server, "a server that samples instead"),
    };
  }
  bool operator==(const RolloutConfig&) const = default;
};

}  // namespace longstraw::core::data
