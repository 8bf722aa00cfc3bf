#pragma once
// Responses from a running OpenAI-compatible server (vLLM, SGLang): token ids and log-probs in, weights out as a checkpoint folder.
// HTTP is spoken by a Python process (python/longstraw/server.py); docs/rollouts.md says what a server must be able to do.
//
//   ServerSampler sampler({.server = config.rollout.server, .stop_token_ids = stops, .vocab = vocab, .write_weights = write});
//   RolloutGroup group = sampler.sample(prompt, config.rollout, stream);   // with sampling_logprobs
//   sampler.weights_changed(step);                                         // after every optimizer step

#include "core/data/child_process.h"
#include "training/rollout.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::training {

struct ServerSamplerOptions {
  core::data::ServerConfig server;
  std::vector<int64_t> stop_token_ids;
  int64_t vocab = 0;  // of the trained model: the server's ids must be below it
  // Writes the weights of `step` as a Hugging Face checkpoint, and returns its folder, as the server sees it (server_weights.h).
  // Empty: weights are never handed over.
  std::function<std::filesystem::path(int64_t step)> write_weights;
  bool echo_errors = true;  // pass on what is said of requests that are sent again
};

class ServerSampler final : public Sampler {
 public:
  // Starts the Python process; asks nothing of the server yet. ConfigError for an address that is none.
  explicit ServerSampler(ServerSamplerOptions options);

  // One request for all responses of the prompt; the first hands the weights over before, as a server may have those of an earlier
  // run. A server that can't be reached, answers 5xx, takes longer than its time, answers rubbish or another number of completions
  // is asked again server.retries times; then CommunicationError, with what was asked and answered. At once: CommunicationError for
  // a 4xx and for ids outside the vocabulary, ConfigError for a server that returns no token ids or no log-probs. The same stream
  // asks with the same seed; whether a server then gives the same responses is its own affair.
  RolloutGroup sample(const EncodedPrompt& prompt, const core::data::RolloutConfig& rollout, uint64_t stream) override;

  // Every server.sync_steps steps: writes the weights and tells the server (server.reload_path; empty: the folder is only written,
  // and not before the first request). CommunicationError when it does not take them.
  void weights_changed(int64_t step) override;

 private:
  nlohmann::json ask(nlohmann::json request, const std::string& doing);
  void hand_over(int64_t step);

  ServerSamplerOptions options_;
  core::data::ChildProcess child_;
  int64_t requests_ = 0;
  bool handed_over_ = false;
};

}  // namespace longstraw::training
