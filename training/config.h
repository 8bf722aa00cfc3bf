#pragma once
// Section `train`: the training loop, in the names of TRL's GRPOConfig and transformers' TrainingArguments.

#include "core/config/fields.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::training {

enum class Arm { kReference, kDetached, kTail, kExact };
constexpr auto names_of(Arm) {
  using core::config::EnumName;
  return std::array{EnumName{Arm::kReference, "reference"}, EnumName{Arm::kDetached, "detached"}, EnumName{Arm::kTail, "tail"},
                    EnumName{Arm::kExact, "exact"}};
}

enum class NonFinitePolicy { kStop, kSkip };
constexpr auto names_of(NonFinitePolicy) {
  using core::config::EnumName;
  return std::array{EnumName{NonFinitePolicy::kStop, "stop"}, EnumName{NonFinitePolicy::kSkip, "skip"}};
}

enum class LongPrompt { kError, kLeftTruncate, kSkip };
constexpr auto names_of(LongPrompt) {
  using core::config::EnumName;
  return std::array{EnumName{LongPrompt::kError, "error"}, EnumName{LongPrompt::kLeftTruncate, "left_truncate"},
                    EnumName{LongPrompt::kSkip, "skip"}};
}

enum class Sink { kTensorboard, kWandb };
constexpr auto names_of(Sink) {
  using core::config::EnumName;
  return std::array{EnumName{Sink::kTensorboard, "tensorboard"}, EnumName{Sink::kWandb, "wandb"}};
}

struct TrainConfig {
  Arm arm = Arm::kExact;
  std::string output_dir;
  std::string resume_from_checkpoint = "auto";
  std::uint64_t seed = 42;
  std::int64_t prompts_per_step = 1;
  std::int64_t steps_per_generation = 1;
  std::int64_t num_iterations = 1;
  std::int64_t max_steps = 0;
  double num_train_epochs = 1.0;
  bool shuffle = true;
  std::optional<std::int64_t> max_prompt_length;
  LongPrompt long_prompt = LongPrompt::kError;
  std::int64_t dynamic_sampling_tries = 0;
  bool mask_truncated_completions = false;
  std::int64_t soft_punish_cache = 0;
  std::int64_t stale_steps = 0;
  std::optional<std::string> ref_model;
  bool sync_ref_model = false;
  double ref_model_mixup_alpha = 0.6;
  std::int64_t ref_model_sync_steps = 512;
  std::optional<std::string> eval_prompts;
  std::int64_t eval_steps = 0;
  std::int64_t eval_num_generations = 1;
  double eval_temperature = 0.0;
  std::int64_t save_steps = 500;
  std::int64_t save_total_limit = 0;
  bool save_best = true;
  bool merge_adapters = false;
  std::int64_t logging_steps = 1;
  std::int64_t record_gradients_steps = 0;
  std::vector<Sink> report_to;
  NonFinitePolicy non_finite = NonFinitePolicy::kStop;

  static constexpr auto fields() {
    using namespace core::config;
    using C = TrainConfig;
    return std::tuple{
        field("arm", &C::arm, "way to get the gradient"),
        field("output_dir", &C::output_dir, "folder of checkpoints, metrics.jsonl and the record"),
        field("resume_from_checkpoint", &C::resume_from_checkpoint,
              "auto: the newest whole checkpoint of output_dir, if there is one; never; or a checkpoint folder"),
        field("seed", &C::seed, "of the order of prompts and of sampling"),
        field("prompts_per_step", &C::prompts_per_step, "prompts (groups) of one generation", at_least(1)),
        field("steps_per_generation", &C::steps_per_generation,
              "mini-batches, an optimizer step each, that a generation is split into", at_least(1)),
        field("num_iterations", &C::num_iterations, "passes over a generation (mu in the GRPO paper)", at_least(1)),
        field("max_steps", &C::max_steps, "optimizer steps; 0: as num_train_epochs says", at_least(0)),
        field("num_train_epochs", &C::num_train_epochs, "passes over the prompts, when max_steps is 0", above(0)),
        field("shuffle", &C::shuffle, "prompts in a new order every epoch"),
        field("max_prompt_length", &C::max_prompt_length, "longest prompt allowed, in tokens; null: any", at_least(1)),
        field("long_prompt", &C::long_prompt, "what is done with a longer one"),
        field("dynamic_sampling_tries", &C::dynamic_sampling_tries,
              "groups of equal rewards are dropped and other prompts sampled, up to so many times a step (DAPO); 0: they are kept",
              at_least(0)),
        field("mask_truncated_completions", &C::mask_truncated_completions,
              "responses cut off at max_completion_length have no loss"),
        field("soft_punish_cache", &C::soft_punish_cache,
              "tokens before max_completion_length over which the overlong penalty grows to -1 (DAPO); 0: none", at_least(0)),
        field("stale_steps", &C::stale_steps,
              "optimizer steps over which a captured prompt may be used on, though the weights changed (detached only)",
              at_least(0)),
        field("ref_model", &C::ref_model,
              "checkpoint of the KL term's reference model; null: the start of this run (under LoRA the frozen base)"),
        field("sync_ref_model", &C::sync_ref_model, "move the reference model towards the policy every ref_model_sync_steps"),
        field("ref_model_mixup_alpha", &C::ref_model_mixup_alpha, "reference = alpha policy + (1 - alpha) reference",
              between(0, 1)),
        field("ref_model_sync_steps", &C::ref_model_sync_steps, "optimizer steps between two synchronisations", at_least(1)),
        field("eval_prompts", &C::eval_prompts, "held-out prompts, scored by the same rewards; null: none"),
        field("eval_steps", &C::eval_steps, "optimizer steps between evaluations; 0: at the end only", at_least(0)),
        field("eval_num_generations", &C::eval_num_generations, "responses a held-out prompt", at_least(1)),
        field("eval_temperature", &C::eval_temperature, "of sampling in evaluations; 0: the likeliest token", at_least(0)),
        field("save_steps", &C::save_steps, "optimizer steps between checkpoints; 0: at the end only", at_least(0)),
        field("save_total_limit", &C::save_total_limit, "checkpoints kept, the best besides; 0: all", at_least(0)),
        field("save_best", &C::save_best, "keep the checkpoint of the best evaluation"),
        field("merge_adapters", &C::merge_adapters, "beside the adapter, save the weights with the adapter merged into them"),
        field("logging_steps", &C::logging_steps, "optimizer steps between lines of metrics", at_least(1)),
        field("record_gradients_steps", &C::record_gradients_steps, "optimizer steps between gradients in the record; 0: none",
              at_least(0)),
        field("report_to", &C::report_to, "where metrics go besides metrics.jsonl and the record"),
        field("non_finite", &C::non_finite, "a loss or gradient that is not finite: stop, or skip the step"),
    };
  }
  bool operator==(const TrainConfig&) const = default;
};

}  // namespace longstraw::training
