#include "training/optimizer_step.h"

#include "core/base/errors.h"

#include <fmt/format.h>

#include <cmath>
#include <optional>

namespace longstraw::training {
namespace {

using core::data::Batch;
using core::model::StepGradient;

std::optional<std::string> not_finite(const core::model::Decoder& decoder, const StepGradient& gradient) {
  if (const auto found = core::optim::first_non_finite(decoder, gradient.gradients)) {
    return fmt::format("the gradient of {} is {} at element {}", found->parameter, found->value, found->index);
  }
  if (!std::isfinite(gradient.loss)) return fmt::format("the loss is {}, and every gradient is finite", gradient.loss);
  return std::nullopt;
}

// Advantages and the like are part of the batch, so a prompt alone meets what it met among the others, but for a denominator.
std::string guilty_prompt(const StepInputs& inputs) {
  for (const auto& group : inputs.batch) {
    const Batch alone{group};
    if (not_finite(inputs.decoder, inputs.policy.gradient(inputs.decoder, alone, {}))) {
      return fmt::format("it comes from prompt {}", group.prompt_id);
    }
  }
  return "no prompt alone makes it so, only their sum";
}

void add_facts(Metrics& metrics, const StepGradient& gradient) {
  for (const auto& [name, value] : gradient.facts) metrics["longstraw/" + name] = value;
  for (const auto& [name, bytes] : gradient.bytes) metrics["longstraw/bytes/" + name] = double(bytes);
  for (const auto& [name, seconds] : gradient.seconds) metrics["longstraw/seconds/" + name] = seconds;
  const auto kept = gradient.facts.find("kept_tokens"), recomputed = gradient.facts.find("recomputed_tokens");
  if (kept != gradient.facts.end() && recomputed != gradient.facts.end() && kept->second + recomputed->second > 0) {
    metrics["longstraw/kept_graph_share"] = kept->second / (kept->second + recomputed->second);
  }
}

}  // namespace

Metrics optimizer_step(const StepInputs& inputs) {
  StepGradient gradient = inputs.policy.gradient(inputs.decoder, inputs.batch, inputs.captured);
  Metrics metrics = step_metrics(inputs.batch, gradient, inputs.objective);
  add_facts(metrics, gradient);
  if (const auto problem = not_finite(inputs.decoder, gradient)) {
    const std::string text = fmt::format("{}; {}", *problem, guilty_prompt(inputs));
    if (inputs.non_finite == NonFinitePolicy::kStop) {
      throw Error(ExitStatus::kFailedRunning, text + " (train.non_finite: skip leaves such a step out)");
    }
    inputs.say(text + ": the step is left out");
    metrics["longstraw/skipped_steps"] = 1.0;
    return metrics;
  }
  metrics["longstraw/skipped_steps"] = 0.0;
  if (inputs.record) inputs.record(gradient);
  *inputs.updating = true;
  const auto report = inputs.optimizer.step(std::move(gradient.gradients));
  *inputs.updating = false;
  metrics["grad_norm"] = report.grad_norm;
  metrics["learning_rate"] = report.learning_rate;
  return metrics;
}

}  // namespace longstraw::training
