#pragma once
// One optimizer step of a mini-batch: gradient, checks, update, figures.

#include "core/optim/optimizer.h"
#include "training/metrics.h"
#include "training/policy.h"

#include <functional>
#include <string>

namespace longstraw::training {

struct StepInputs {
  core::model::Decoder& decoder;
  core::optim::Optimizer& optimizer;
  const Policy& policy;
  const core::objective::ObjectiveConfig& objective;
  const core::data::Batch& batch;
  Captured captured;
  NonFinitePolicy non_finite = NonFinitePolicy::kStop;
  // Sees the gradient before the optimizer consumes it; may be empty.
  std::function<void(const core::model::StepGradient&)> record;
  std::function<void(std::string_view line)> say;
  bool* updating = nullptr;  // true while weights are being written: what stands then is no whole step
};

// Figures of the step. Throws Error naming the first parameter (or the loss) that is not finite and the prompt that it comes from,
// unless it is to be skipped: then weights and optimizer stay as they were.
Metrics optimizer_step(const StepInputs& inputs);

}  // namespace longstraw::training
