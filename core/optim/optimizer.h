#pragma once
// The optimizer over a decoder's trained parameters (all of them, or its adapters): torch::optim over wide master copies.
// Where the model computes in bfloat16, masters are float32 and each step rounds them into the weights; elsewhere the
// weights are their own masters. Deterministic; state goes out and comes back bit for bit.

#include "core/model/decoder.h"
#include "core/optim/config.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::optim {

// Learning rate of optimizer step `step` (from 0) of `total_steps`, as transformers' get_scheduler gives it.
double learning_rate(const OptimConfig& config, std::int64_t step, std::int64_t total_steps);

// Whether weight decay acts on a parameter: transformers' rule (Trainer.get_decay_parameter_names, 5.17), by name: not on one that
// holds "bias", "layernorm" or "rmsnorm", nor on the weight of a module "norm" or "..._norm".
bool is_decayed(const std::string& parameter);

// Euclidean norm over all gradients, summed in float64 in an order that depends on nothing but their shapes.
double global_norm(const std::vector<at::Tensor>& gradients);

// A value that is not finite, by the place it was first found.
struct NonFinite {
  std::string parameter;
  std::int64_t index = 0;
  double value = 0.0;
};
std::optional<NonFinite> first_non_finite(const model::Decoder& decoder, const std::vector<at::Tensor>& gradients);

struct StepReport {
  double grad_norm = 0.0;  // before clipping
  double learning_rate = 0.0;
};

class Optimizer {
 public:
  // Of the parameters the decoder has now: adapters are added before. The decoder outlives it. ConfigError for a beta of 1.
  Optimizer(model::Decoder& decoder, const OptimConfig& config, std::int64_t total_steps);
  ~Optimizer();

  // Clips as torch.nn.utils.clip_grad_norm_ does, steps, and writes the new weights in place (their versions rise). `gradients` are
  // parallel to Decoder::parameters(), and are scaled in place. They must be finite: see first_non_finite.
  StepReport step(std::vector<at::Tensor> gradients);
  std::int64_t steps() const;  // taken so far

  // Everything that a continued run needs, by name: masters/<parameter> (where they are not the weights), and
  // <moment>/<parameter> (exp_avg and exp_avg_sq of AdamW, momentum_buffer of SGD with momentum; none before the first step).
  // CPU tensors, which may share the optimizer's memory: write or copy them before the next step.
  std::map<std::string, at::Tensor> state() const;
  // Throws FormatError naming the entry that is missing, surplus or of another shape or dtype, and changes nothing then. Weights
  // become those of the masters.
  void load_state(const std::map<std::string, at::Tensor>& state, std::int64_t steps);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longstraw::core::optim
