#include "training/policy.h"

#include "longstraw/trainer.h"
#include "reference/gradient.h"
#include "reference/objective.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace longstraw::training {
namespace {

using core::data::Batch;
using core::model::Decoder;
using core::model::StepGradient;
using core::model::TokenScores;
using core::objective::ObjectiveConfig;

class ReferencePolicy final : public Policy {
 public:
  ReferencePolicy(const Settings& settings, ObjectiveConfig objective)
      : options_{.run = {.attention = settings.reference.attention, .trace = settings.record.trace},
                 .objective = std::move(objective),
                 .temperature = settings.rollout.temperature,
                 .max_completion_length = settings.rollout.max_completion_length},
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
    const at::NoGradGuard no_grad;
    const auto lengths = sequence_lengths(batch);
    TokenScores scores;
    for (const auto& group : batch) {
      auto& members = scores.logprobs.emplace_back();
      for (const auto& response : group.responses) {
        const at::Tensor logits =
            reference::response_logits(decoder, group.prompt_ids, response.completion_ids, lengths, options_.run) /
            options_.temperature;
        const at::Tensor ids = at::tensor(response.completion_ids, at::kLong).to(logits.device()).unsqueeze(1);
        const at::Tensor logprobs = at::log_softmax(logits, 1).gather(1, ids).squeeze(1).to(at::kCPU, at::kDouble).contiguous();
        members.emplace_back(logprobs.const_data_ptr<double>(), logprobs.const_data_ptr<double>() + logprobs.numel());
      }
    }
    return scores;
  }
  LongstrawConfig capture() const override { return capture_; }
  bool serves_gradient() const override { return false; }
  bool scores_first(const Batch&) const override { return false; }

 private:
  reference::ReferenceOptions options_;
  LongstrawConfig capture_;
};

// A sum over tokens that no gradient is asked of: what is left are log-probs.
class NoObjective final : public TokenObjective {
 public:
  explicit NoObjective(double temperature) : temperature_(temperature) {}
  TokenLoss token(int64_t, int64_t, int64_t, double, double) const override { return {}; }
  bool has_gradient(int64_t, int64_t) const override { return false; }
  double temperature() const override { return temperature_; }

 private:
  double temperature_;
};

class LongstrawPolicy final : public Policy {
 public:
  LongstrawPolicy(const Settings& settings, ObjectiveConfig objective)
      : options_{.longstraw = settings.longstraw,
                 .objective = std::move(objective),
                 .temperature = settings.rollout.temperature,
                 .max_completion_length = settings.rollout.max_completion_length,
                 .trace = settings.record.trace} {
    switch (settings.train.arm) {
      case Arm::kDetached: options_.longstraw.prompt_gradient = PromptGradient::kDetached; break;
      case Arm::kTail: options_.longstraw.prompt_gradient = PromptGradient::kTail; break;
      default: options_.longstraw.prompt_gradient = PromptGradient::kExact;
    }
  }

  std::vector<std::vector<double>> advantages(const Batch& batch) const override {
    return group_advantages(batch, options_.objective);
  }
  StepGradient gradient(const Decoder& decoder, const Batch& batch, const Captured& captured) const override {
    TrainerOptions options = options_;
    options.captured = captured;
    return longstraw_gradient(decoder, batch, options);
  }
  TokenScores scores(const Decoder& decoder, const Batch& batch, const Captured& captured) const override {
    TrainerOptions options = options_;
    options.captured = captured;
    return {.logprobs = longstraw_gradient(decoder, batch, NoObjective(options_.temperature), options).logprobs, .entropies = {}};
  }
  LongstrawConfig capture() const override { return options_.longstraw; }
  bool serves_gradient() const override { return true; }
  bool scores_first(const Batch&) const override { return false; }

 private:
  TrainerOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_policy(const Settings& settings, const ObjectiveConfig& objective) {
  if (settings.train.arm == Arm::kReference) return std::make_unique<ReferencePolicy>(settings, objective);
  return std::make_unique<LongstrawPolicy>(settings, objective);
}

}  // namespace longstraw::training
