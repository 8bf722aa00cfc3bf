#include "app/sample_batch.h"

#include "app/interrupt.h"

#include "core/base/atomic_file.h"
#include "core/base/errors.h"
#include "longstraw/sampler.h"
#include "training/local_sampler.h"
#include "training/prompt_set.h"

#include <fmt/format.h>

#include <algorithm>

namespace longstraw::app {
namespace {

namespace fs = std::filesystem;
using core::data::PromptRow;
using core::model::Decoder;

}  // namespace

PromptSampler::PromptSampler(const RunConfig& config, Progress& progress) : config_(config), progress_(progress) {
  if (!config.data.prompts) throw ConfigError("data.prompts: not given, wanted a JSONL file of prompts");
  rows_ = core::data::read_prompts(*config.data.prompts);
  has_tokenizer_ = training::has_tokenizer(config.model.path);
  if (!has_tokenizer_) {
    const auto encoded = [](const PromptRow& row) { return row.prompt_ids.has_value(); };
    const auto text = std::find_if_not(rows_.begin(), rows_.end(), encoded);
    if (text != rows_.end()) {
      throw FormatError(fmt::format("{}: prompt {} is a text, and {} has no tokenizer; wanted prompt_ids", *config.data.prompts,
                                    text->prompt_id, config.model.path));
    }
    progress.say(fmt::format("{} has no tokenizer: completions have no text", config.model.path));
  }
  const bool scores = config.data.reward && !config.data.reward->empty();
  if (!has_tokenizer_ && !scores) return;
  progress.begin("starting Python");
  if (has_tokenizer_)
    tokenizer_ = std::make_unique<core::data::ScoringProcess>(core::data::ScoringOptions{.model = config.model.path});
  if (scores) {
    reward_weights_ = core::data::reward_weights(*config.data.reward, config.objective.reward_weights);
    rewards_ = std::make_unique<core::data::RewardFunctions>(core::data::RewardOptions{
        .functions = *config.data.reward, .timeout_seconds = config.data.reward_timeout, .errors = config.data.reward_errors});
    rewards_->prepare();
  }
  progress.done();
}

std::vector<int64_t> PromptSampler::encode(const Decoder& decoder, size_t index) {
  const PromptRow& row = rows_.at(index);
  const std::vector<int64_t> ids = row.prompt_ids ? *row.prompt_ids : tokenizer_->encode(row.prompt);
  const int64_t vocab = decoder.architecture().vocab;
  const auto outside = std::find_if(ids.begin(), ids.end(), [&](int64_t id) { return id < 0 || id >= vocab; });
  const std::string place = fmt::format("{}: prompt {}: prompt_ids", *config_.data.prompts, row.prompt_id);
  if (outside != ids.end()) {
    throw FormatError(fmt::format("{}: got {} at {}, wanted 0 to {} (the vocabulary of {})", place, *outside, outside - ids.begin(),
                                  vocab - 1, config_.model.path));
  }
  if (ids.empty()) throw FormatError(place + ": the prompt has no token");
  return ids;
}

void PromptSampler::score(const PromptRow& row, SampledGroup& sampled) {
  if (!rewards_) return;
  std::vector<core::data::ScoredCompletion> scored;
  for (size_t m = 0; m < sampled.completions.size(); ++m) {
    scored.push_back({&row, sampled.completions[m], sampled.group.responses[m].completion_ids});
  }
  auto parts = rewards_->score(scored);
  for (size_t m = 0; m < parts.size(); ++m) {
    core::data::Response& response = sampled.group.responses[m];
    response.reward = core::data::weighted_reward(parts[m], reward_weights_);
    response.reward_parts = std::move(parts[m]);
  }
}

SampledGroup PromptSampler::sample(const Decoder& decoder, size_t index) {
  return sample(decoder, index, encode(decoder, index), config_.rollout);
}

SampledGroup PromptSampler::sample(const Decoder& decoder, size_t index, std::vector<int64_t> prompt_ids,
                                   const core::data::RolloutConfig& rollout) {
  const PromptRow& row = rows_.at(index);
  progress_.begin(fmt::format("sampling {} responses to prompt {}", rollout.num_generations, row.prompt_id));
  SampledGroup sampled;
  sampled.prompt = row.prompt;
  sampled.group.prompt_id = row.prompt_id;
  sampled.group.prompt_ids = std::move(prompt_ids);
  const auto at_token = [this](int64_t tokens) { progress_.at(fmt::format("{} tokens", tokens)); };
  auto responses = sample_group(decoder, sampled.group.prompt_ids, index,
                                {.rollout = rollout,
                                 .stop_token_ids = training::stop_token_ids(rollout, decoder),
                                 .segment_tokens = config_.longstraw.segment_tokens,
                                 .progress = at_token});
  std::vector<std::vector<int64_t>> ids;
  for (auto& response : responses) {
    ids.push_back(response.completion_ids);
    core::data::Response kept;
    kept.completion_ids = std::move(response.completion_ids);
    kept.sampling_logprobs = std::move(response.sampling_logprobs);
    sampled.group.responses.push_back(std::move(kept));
  }
  sampled.completions = has_tokenizer_ ? tokenizer_->decode(ids) : std::vector<std::string>(ids.size());
  score(row, sampled);
  progress_.done(fmt::format("{} prompt tokens", sampled.group.prompt_ids.size()));
  return sampled;
}

void write_sampled(const fs::path& path, const std::vector<SampledGroup>& groups) {
  const WritingResults signals_wait;
  AtomicFile file(path);
  for (const auto& sampled : groups) {
    for (size_t m = 0; m < sampled.completions.size(); ++m) {
      const auto& response = sampled.group.responses[m];
      nlohmann::ordered_json line{{"prompt_id", sampled.group.prompt_id},
                                  {"prompt_ids", sampled.group.prompt_ids},
                                  {"completion_ids", response.completion_ids}};
      if (response.reward) line["reward"] = *response.reward;
      if (!response.reward_parts.empty()) {
        auto& parts = line["reward_parts"] = nlohmann::ordered_json::array();
        for (const auto& part : response.reward_parts)
          parts.push_back(part ? nlohmann::ordered_json(*part) : nlohmann::ordered_json());
      }
      if (response.sampling_logprobs) line["sampling_logprobs"] = *response.sampling_logprobs;
      if (!sampled.prompt.is_null()) line["prompt"] = sampled.prompt;
      line["completion"] = sampled.completions[m];
      // A completion cut inside a character is no UTF-8.
      file.write(line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
    }
  }
  file.commit();
}

}  // namespace longstraw::app
