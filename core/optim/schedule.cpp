// transformers.get_scheduler, formula by formula (transformers/optimization.py).
#include "core/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace longstraw::core::optim {

namespace {

double factor(Schedule schedule, std::int64_t step, std::int64_t warmup, std::int64_t total) {
  if (schedule == Schedule::kConstant) return 1.0;
  if (step < warmup) return static_cast<double>(step) / static_cast<double>(std::max<std::int64_t>(1, warmup));
  if (schedule == Schedule::kConstantWithWarmup) return 1.0;
  const auto falling = static_cast<double>(std::max<std::int64_t>(1, total - warmup));
  if (schedule == Schedule::kLinear) return std::max(0.0, static_cast<double>(total - step) / falling);
  const double progress = static_cast<double>(step - warmup) / falling;
  return std::max(0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * 0.5 * 2.0 * progress)));
}

}  // namespace

double learning_rate(const OptimConfig& config, std::int64_t step, std::int64_t total_steps) {
  return config.learning_rate * factor(config.lr_scheduler_type, step, config.warmup_steps, total_steps);
}

}  // namespace longstraw::core::optim
