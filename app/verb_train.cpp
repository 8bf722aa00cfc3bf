// longstraw train: the whole GRPO loop, by any arm.

#include "app/arms.h"
#include "app/build_info.h"
#include "app/command_line.h"
#include "app/interrupt.h"
#include "app/output.h"

#include "core/config/load.h"
#include "core/device/device.h"
#include "training/train.h"

#include <fmt/format.h>
#include <torch/version.h>

#include <algorithm>

namespace longstraw::app {
namespace {

struct TrainOptions {
  ConfigOptions config;
};

training::Settings settings_of(const RunConfig& config) {
  return {.model = config.model,
          .lora = config.lora,
          .data = config.data,
          .rollout = config.rollout,
          .objective = config.objective,
          .longstraw = config.longstraw,
          .reference = config.reference,
          .record = config.record,
          .train = config.train,
          .optim = config.optim,
          .config_yaml = core::config::dump(config),
          .torch_version = TORCH_VERSION,
          .git_commit = kGitCommit};
}

void say_what_is_gained(const training::Data& data, const RunConfig& config, Progress& progress) {
  const bool alone = data.prompts ? config.rollout.num_generations == 1 : [&data] {
    return std::all_of(data.rollouts->begin(), data.rollouts->end(), [](const auto& group) { return group.responses.size() == 1; });
  }();
  if (!alone || config.train.arm == Arm::kReference) return;
  progress.say("every prompt has a single response, so no prompt is shared: LongStraw gains no time over a plain trainer here");
}

ExitStatus run_train(const TrainOptions&, const RunConfig& config) {
  const training::Settings settings = settings_of(config);
  training::check_settings(settings);
  require_writable_folder(config.train.output_dir);
  Progress progress;
  const StopRequest stop;
  const training::Hooks hooks{.say = [&progress](std::string_view line) { progress.say(line); },
                              .progress = [&progress](std::string_view where) { progress.at(where); },
                              .should_stop = [&stop] { return stop.made(); }};
  training::Data data = training::read_data(settings, hooks);
  say_what_is_gained(data, config, progress);
  const auto decoder = open_model(config.model, config.lora, progress);
  progress.begin("training");
  const training::Outcome outcome = training::train(*decoder, data, settings, hooks);
  progress.done(fmt::format("{} steps", outcome.steps));
  if (outcome.interrupted) {
    progress.say(outcome.checkpoint.empty()
                     ? std::string("stopped before the first step: there is nothing to save")
                     : fmt::format("stopped when told to; the same command goes on from {}", outcome.checkpoint.string()));
  }
  if (!outcome.checkpoint.empty()) fmt::print("{}\n", outcome.checkpoint.string());
  return ExitStatus::kWithinBounds;
}

}  // namespace

void add_train(CLI::App& program, Action& chosen) {
  CLI::App& verb = *program.add_subcommand("train", "train by GRPO: rollouts, rewards, optimizer steps, checkpoints");
  const auto options = std::make_shared<TrainOptions>();
  add_shortcut(verb, options->config, "--model", "model.path", "checkpoint folder");
  add_shortcut(verb, options->config, "--prompts", "data.prompts", "JSONL of prompts", {"data.rollouts"});
  add_shortcut(verb, options->config, "--rollouts", "data.rollouts", "JSONL of responses to train on instead", {"data.prompts"});
  add_shortcut(verb, options->config, "--reward", "data.reward", "reward function, FILE.py:FUNCTION");
  add_shortcut(verb, options->config, "--arm", "train.arm", "way to get the gradient: reference, detached, tail or exact");
  add_shortcut(verb, options->config, "--out", "train.output_dir", "folder of checkpoints, metrics and the record");
  add_config_options(verb, options->config);
  choose(verb, chosen, options, run_train);
}

}  // namespace longstraw::app
