#include "training/server_sampler.h"

#include "core/base/errors.h"
#include "core/data/reward_process.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace longstraw::training {
namespace {

using nlohmann::json;

core::data::ChildOptions client(const ServerSamplerOptions& options) {
  auto child = core::data::python_module("longstraw.server", fmt::format("parent={}", ::getpid()));
  child.echo_errors = options.echo_errors;
  return child;
}

// Mixes seed and stream (SplitMix64), and keeps 31 bits: what every server takes for a seed.
uint64_t request_seed(uint64_t seed, uint64_t stream) {
  const auto mixed = [](uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  };
  return mixed(seed ^ mixed(stream)) >> 33;
}

void check_ids(const std::vector<int64_t>& ids, int64_t vocab, const std::string& url) {
  const auto outside = std::find_if(ids.begin(), ids.end(), [&](int64_t id) { return id >= vocab; });
  if (outside == ids.end()) return;
  throw CommunicationError(
      fmt::format("server {}: sampled token {}, wanted 0 to {}: it serves another model", url, *outside, vocab - 1));
}

}  // namespace

ServerSampler::ServerSampler(ServerSamplerOptions options) : options_(std::move(options)), child_(client(options_)) {
  const auto& server = options_.server;
  ask({{"op", "open"},
       {"url", server.url},
       {"model", server.model},
       {"timeout", server.timeout},
       {"retries", server.retries},
       {"reload_path", server.reload_path}},
      "starting");
}

json ServerSampler::ask(json request, const std::string& doing) {
  const int64_t id = ++requests_;
  request["id"] = id;
  // The client keeps the time of each try; this is for a client that hangs itself.
  constexpr double kPause = 30.0, kStart = 300.0;
  const double seconds = kStart + double(options_.server.retries + 1) * (options_.server.timeout * 2 + kPause);
  std::string line;
  try {
    line = child_.exchange(request.dump(), std::chrono::duration<double>(seconds));
  } catch (const core::data::ProcessError& error) {
    throw CommunicationError(fmt::format("client of server {}, {}: {}", options_.server.url, doing, error.what()));
  }
  json answer = json::parse(line, nullptr, false);
  if (!answer.is_object() || answer.value("id", int64_t{0}) != id) {
    child_.kill();
    throw CommunicationError(
        fmt::format("client of server {}, {}: broke its protocol{}", options_.server.url, doing, child_.last_words()));
  }
  if (answer.contains("error")) {
    const auto message = answer["error"].get<std::string>();
    if (answer.value("kind", "") == "config") throw ConfigError(message);
    throw CommunicationError(message);
  }
  return answer;
}

RolloutGroup ServerSampler::sample(const EncodedPrompt& prompt, const core::data::RolloutConfig& rollout, uint64_t stream) {
  if (!handed_over_ && !options_.server.reload_path.empty()) hand_over(0);
  json answer = ask({{"op", "sample"},
                     {"prompt_ids", prompt.ids},
                     {"n", rollout.num_generations},
                     {"max_tokens", rollout.max_completion_length},
                     {"temperature", rollout.temperature},
                     {"top_p", rollout.top_p},
                     {"top_k", rollout.top_k},
                     {"seed", request_seed(rollout.seed, stream)},
                     {"stop_token_ids", options_.stop_token_ids}},
                    "sampling");
  RolloutGroup sampled;
  sampled.group.prompt_id = prompt.row->prompt_id;
  sampled.group.prompt_ids = prompt.ids;
  for (const json& one : answer.at("responses")) {
    auto& response = sampled.group.responses.emplace_back();
    response.completion_ids = one.at("ids").get<std::vector<int64_t>>();
    check_ids(response.completion_ids, options_.vocab, options_.server.url);
    response.sampling_logprobs = one.at("logprobs").get<std::vector<double>>();
    sampled.truncated.push_back(one.at("truncated").get<bool>() ? 1 : 0);
  }
  return sampled;
}

void ServerSampler::weights_changed(int64_t step) {
  if (step % options_.server.sync_steps == 0) hand_over(step);
}

void ServerSampler::hand_over(int64_t step) {
  handed_over_ = true;
  if (!options_.write_weights) return;
  const auto folder = std::filesystem::absolute(options_.write_weights(step));
  if (options_.server.reload_path.empty()) return;
  ask({{"op", "reload"}, {"folder", folder.string()}}, "handing weights over");
}

}  // namespace longstraw::training
