#include "training/data.h"

#include "core/base/errors.h"
#include "core/model/architecture.h"
#include "training/generation.h"

#include <fmt/format.h>

namespace longstraw::training {
namespace {

PromptSet read_prompts(const std::string& path, const std::string& key, const Settings& settings, const Data& data,
                       const Hooks& hooks) {
  PromptSet prompts(path, {.key = key,
                           .model = settings.model.path,
                           .vocab = core::model::read_architecture(settings.model.path).vocab,
                           .max_prompt_length = settings.train.max_prompt_length,
                           .long_prompt = settings.train.long_prompt,
                           .tokenizer = data.tokenizer.get()});
  if (prompts.skipped() > 0) {
    hooks.say(fmt::format("{}: {} prompts are longer than train.max_prompt_length, {}, and left out", path, prompts.skipped(),
                          *settings.train.max_prompt_length));
  }
  if (prompts.truncated() > 0) {
    hooks.say(fmt::format("{}: {} prompts are longer than train.max_prompt_length, {}: their last tokens are kept", path,
                          prompts.truncated(), *settings.train.max_prompt_length));
  }
  return prompts;
}

void set_up_rewards(Data& data, const Settings& settings) {
  if (settings.data.reward) {
    data.rewards =
        std::make_unique<core::data::RewardFunctions>(core::data::RewardOptions{.functions = *settings.data.reward,
                                                                                .timeout_seconds = settings.data.reward_timeout,
                                                                                .errors = settings.data.reward_errors});
    data.reward_names = data.rewards->names();
    data.reward_weights = core::data::reward_weights(*settings.data.reward, settings.objective.reward_weights);
  }
}

// A file's parts have no names, but for those of data.reward where they are as many.
void name_parts(Data& data) {
  if (!data.rollouts) return;
  const size_t parts = data.rollouts->front().responses.front().reward_parts.size();
  if (parts == data.reward_names.size() || (parts == 0 && data.reward_names.size() == 1)) return;
  data.reward_names.clear();
  for (size_t k = 0; k < parts; ++k) data.reward_names.push_back(fmt::format("reward_{}", k + 1));
}

// A file that has sums alone: the penalty is added to the sum as a second part, whatever the weights of its parts were.
void split_sums(Data& data) {
  if (!data.rollouts || !data.rollouts->front().responses.front().reward_parts.empty()) return;
  for (auto& group : *data.rollouts) {
    for (auto& response : group.responses) {
      if (response.reward_parts.empty()) response.reward_parts = {response.reward};
    }
  }
  data.objective.reward_weights.reset();
}

}  // namespace

Data read_data(const Settings& settings, const Hooks& hooks) {
  Data data;
  data.objective = settings.objective;
  set_up_rewards(data, settings);
  const bool samples = settings.data.prompts || settings.train.eval_prompts;
  if (samples && has_tokenizer(settings.model.path)) {
    data.tokenizer = std::make_unique<core::data::ScoringProcess>(
        core::data::ScoringOptions{.model = settings.model.path, .timeout_seconds = settings.data.reward_timeout});
  } else if (samples) {
    hooks.say(fmt::format("{} has no tokenizer: completions have no text", settings.model.path));
  }
  if (settings.data.prompts) {
    data.prompts.emplace(read_prompts(*settings.data.prompts, "data.prompts", settings, data, hooks));
  } else {
    data.rollouts = core::data::read_rollouts(*settings.data.rollouts,
                                              {.vocab_size = core::model::read_architecture(settings.model.path).vocab});
  }
  if (settings.train.eval_prompts) {
    data.eval_prompts.emplace(read_prompts(*settings.train.eval_prompts, "train.eval_prompts", settings, data, hooks));
  }
  if (data.rewards && samples) data.rewards->prepare();
  if (settings.train.soft_punish_cache > 0) split_sums(data);
  name_parts(data);
  if (settings.train.soft_punish_cache > 0) {
    data.reward_names.emplace_back(kOverlongPenalty);
    if (data.objective.reward_weights) data.objective.reward_weights->push_back(1.0);
  }
  return data;
}

}  // namespace longstraw::training
