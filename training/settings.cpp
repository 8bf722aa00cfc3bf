#include "training/settings.h"

#include "core/base/errors.h"
#include "longstraw/objective.h"

#include <fmt/format.h>

#include <vector>

namespace longstraw::training {
namespace {

using Problems = std::vector<std::string>;

void check_data(const Settings& settings, Problems& problems) {
  const TrainConfig& train = settings.train;
  if (settings.model.path.empty()) problems.emplace_back("model.path: not given, wanted a checkpoint folder");
  if (train.output_dir.empty()) problems.emplace_back("train.output_dir: not given, wanted a folder for checkpoints and metrics");
  if (!settings.data.prompts && !settings.data.rollouts) {
    problems.emplace_back(
        "data.prompts: not given, and no data.rollouts either; wanted prompts to sample responses for, or responses");
  }
  if (train.eval_prompts && !settings.data.reward) {
    problems.emplace_back("data.reward: not given, wanted what scores the responses to train.eval_prompts");
  }
  if (train.dynamic_sampling_tries > 0 && settings.data.rollouts) {
    problems.emplace_back("train.dynamic_sampling_tries: data.rollouts is read, not sampled: nothing can be sampled anew");
  }
  if (!settings.rollout.server.url.empty() && settings.data.rollouts) {
    problems.emplace_back("rollout.server.url: data.rollouts has the responses already, wanted one of them");
  }
}

// For every arm: rewards compare arms, and what one of them refuses can't be compared.
void check_loss(const Settings& settings, Problems& problems) {
  try {
    check_objective(settings.objective);
  } catch (const ConfigError& refused) {
    problems.emplace_back(refused.what());
  }
}

void check_reference_model(const Settings& settings, Problems& problems) {
  const TrainConfig& train = settings.train;
  const bool kl = settings.objective.beta > 0.0;
  if (train.ref_model && !kl) problems.emplace_back("train.ref_model: objective.beta is 0, so there is no KL term that needs it");
  if (!train.sync_ref_model) return;
  if (!kl) problems.emplace_back("train.sync_ref_model: objective.beta is 0, so there is no reference model");
  if (settings.lora.wanted()) {
    problems.emplace_back(
        "train.sync_ref_model: under LoRA the reference model shares the policy's frozen base, and can't move towards it");
  }
}

void check_steps(const Settings& settings, Problems& problems) {
  const TrainConfig& train = settings.train;
  if (train.stale_steps > 0 && train.arm != Arm::kDetached) {
    problems.push_back(fmt::format(
        "train.stale_steps: {} with train.arm {}: only the detached arm can use a prompt's state after the weights changed; {}",
        train.stale_steps, core::config::name_of(train.arm),
        train.arm == Arm::kReference
            ? "the reference keeps no such state"
            : "a sweep back over the prompt recomputes it, and would meet another state than was captured"));
  }
  const int64_t responses = train.prompts_per_step * settings.rollout.num_generations;
  if (settings.data.prompts && train.steps_per_generation > responses) {
    problems.push_back(fmt::format("train.steps_per_generation: {} mini-batches of {} responses, wanted at least one response each",
                                   train.steps_per_generation, responses));
  }
}

}  // namespace

void check_settings(const Settings& settings) {
  Problems problems;
  check_data(settings, problems);
  check_loss(settings, problems);
  check_reference_model(settings, problems);
  check_steps(settings, problems);
  if (!problems.empty()) throw ConfigError(fmt::format("{}", fmt::join(problems, "\n")));
}

}  // namespace longstraw::training
