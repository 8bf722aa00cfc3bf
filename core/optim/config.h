#pragma once
// Section `optim`: optimizer, schedule and clipping, in the names of transformers' TrainingArguments.

#include "core/config/fields.h"

#include <cstdint>

namespace longstraw::core::optim {

enum class OptimizerName { kAdamw, kSgd };
constexpr auto names_of(OptimizerName) {
  using config::EnumName;
  return std::array{EnumName{OptimizerName::kAdamw, "adamw"}, EnumName{OptimizerName::kSgd, "sgd"}};
}

enum class Schedule { kConstant, kConstantWithWarmup, kLinear, kCosine };
constexpr auto names_of(Schedule) {
  using config::EnumName;
  return std::array{EnumName{Schedule::kConstant, "constant"}, EnumName{Schedule::kConstantWithWarmup, "constant_with_warmup"},
                    EnumName{Schedule::kLinear, "linear"}, EnumName{Schedule::kCosine, "cosine"}};
}

struct OptimConfig {
  OptimizerName optim = OptimizerName::kAdamw;
  double learning_rate = 1e-6;
  Schedule lr_scheduler_type = Schedule::kLinear;
  std::int64_t warmup_steps = 0;
  double weight_decay = 0.0;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_epsilon = 1e-8;
  double sgd_momentum = 0.0;
  double max_grad_norm = 1.0;

  static constexpr auto fields() {
    using namespace config;
    using C = OptimConfig;
    return std::tuple{
        field("optim", &C::optim, "optimizer"),
        field("learning_rate", &C::learning_rate, "largest learning rate", at_least(0)),
        field("lr_scheduler_type", &C::lr_scheduler_type, "learning rate over the steps; all but constant rise over warmup_steps"),
        field("warmup_steps", &C::warmup_steps, "optimizer steps of linear rise", at_least(0)),
        field("weight_decay", &C::weight_decay, "decoupled (adamw) or L2 (sgd); not of biases and norms", at_least(0)),
        field("adam_beta1", &C::adam_beta1, "of adamw", between(0, 1)),
        field("adam_beta2", &C::adam_beta2, "of adamw", between(0, 1)),
        field("adam_epsilon", &C::adam_epsilon, "of adamw", at_least(0)),
        field("sgd_momentum", &C::sgd_momentum, "of sgd", at_least(0)),
        field("max_grad_norm", &C::max_grad_norm, "gradients are scaled down to this norm; 0: never", at_least(0)),
    };
  }
  bool operator==(const OptimConfig&) const = default;
};

}  // namespace longstraw::core::optim
