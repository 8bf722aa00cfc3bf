#include "training/policy.h"

#include "longstraw/trainer.h"
#include "reference/gradient.h"
#include "reference/objective.h"

#include <algorithm>
#include <utility>

namespace longstraw::training {
namespace {

using core::data::Batch;
using core::model::Decoder;
using core::model::StepGradient;
using core::model::TokenScores;
using core::objective::ObjectiveConfig;

constexpr int64_t kDefaultTail = 64;  // as `longstraw gradients` has it

class ReferencePolicy final : public Policy {
 public:
  ReferencePolicy(const Settings& settings, ObjectiveConfig objective)
      : options_{.run = {.attention = settings.reference.attention, .trace = settings.record.trace},
                 .objective = std::move(objective),
                 .temperature = settings.rollout.temperature,
                 .max_completion_length = settings.rollout.max_completion_length,
                 .entropy = true},
        capture_(settings.longstraw) {
    capture_.prompt_gradient = PromptGradient::kDetached;  // for sampling alone: the least memory
  }

  std::vector<std::vector<double>> advantages(const Batch& batch) const override {
    return reference::advantages(batch, options_.objective);
  }
  StepGradient gradient(const Decoder& decoder, const Batch& batch, const Captured&) const override {
    return reference::reference_gradient(decoder, batch, options_);
  }
  TokenScores scores(const Decoder& decoder, const Batch& batch, const Captured&) const override {
    reference::ReferenceOptions options = options_;
    options.entropy = false;
    return reference::reference_scores(decoder, batch, options);
  }
  LongstrawConfig capture() const override { return capture_; }
  bool serves_gradient() const override { return false; }
  bool scores_first(const Batch&) const override { return false; }

 private:
  reference::ReferenceOptions options_;
  LongstrawConfig capture_;
};

class LongstrawPolicy final : public Policy {
 public:
  LongstrawPolicy(const Settings& settings, ObjectiveConfig objective)
      : options_{.longstraw = settings.longstraw,
                 .objective = std::move(objective),
                 .temperature = settings.rollout.temperature,
                 .max_completion_length = settings.rollout.max_completion_length,
                 .trace = settings.record.trace,
                 .entropy = true} {
    switch (settings.train.arm) {
      case Arm::kDetached: options_.longstraw.prompt_gradient = PromptGradient::kDetached; break;
      case Arm::kTail:
        options_.longstraw.prompt_gradient = PromptGradient::kTail;
        if (options_.longstraw.tail_tokens == 0) options_.longstraw.tail_tokens = kDefaultTail;
        break;
      default: options_.longstraw.prompt_gradient = PromptGradient::kExact;
    }
  }

  std::vector<std::vector<double>> advantages(const Batch& batch) const override {
    return group_advantages(batch, options_.objective);
  }
  StepGradient gradient(const Decoder& decoder, const Batch& batch, const Captured& captured) const override {
    TrainerOptions options = options_;
    options.captured = captured;
    if (std::exchange(first_step_, false) == false) options.longstraw.self_check = SelfCheck::kOff;
    // What prompts hold already is no longer there for the graphs of others.
    for (const CapturedPrompt* prompt : captured) {
      if (prompt != nullptr) options.longstraw.memory_budget.count -= prompt->held_bytes();
    }
    options.longstraw.memory_budget.count = std::max<int64_t>(0, options.longstraw.memory_budget.count);
    return longstraw_gradient(decoder, batch, options);
  }
  TokenScores scores(const Decoder& decoder, const Batch& batch, const Captured& captured) const override {
    TrainerOptions options = options_;
    options.captured = captured;
    options.entropy = false;
    return longstraw_scores(decoder, batch, options);
  }
  LongstrawConfig capture() const override { return options_.longstraw; }
  bool serves_gradient() const override { return true; }
  bool scores_first(const Batch& batch) const override { return needs_scores(batch, options_.objective); }

 private:
  TrainerOptions options_;
  mutable bool first_step_ = true;  // the one that self_check checks
};

}  // namespace

std::unique_ptr<Policy> make_policy(const Settings& settings, const ObjectiveConfig& objective) {
  if (settings.train.arm == Arm::kReference) return std::make_unique<ReferencePolicy>(settings, objective);
  return std::make_unique<LongstrawPolicy>(settings, objective);
}

}  // namespace longstraw::training
