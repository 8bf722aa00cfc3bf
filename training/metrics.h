#pragma once
// The figures of a step under TRL's names, and where they go: metrics.jsonl, and a Python process for TensorBoard and Weights &
// Biases.

#include "core/data/rollouts.h"
#include "core/model/step_gradient.h"
#include "core/objective/config.h"
#include "training/config.h"

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace longstraw::training {

using Metrics = std::map<std::string, double>;

// reward, reward_std, frac_reward_zero_std, rewards/<name>/{mean,std}, completions/{mean,min,max}_length, clipped_ratio and
// {mean,min,max}_terminated_length, sampling/…: of a generation. `truncated` [prompt][member].
Metrics generation_metrics(const core::data::Batch& batch, const std::vector<std::string>& reward_names,
                           const std::vector<std::vector<uint8_t>>& truncated);

// loss, kl, entropy, clip_ratio/{low_mean,low_min,high_mean,high_max,region_mean}: of an optimizer step's gradient.
Metrics step_metrics(const core::data::Batch& batch, const core::model::StepGradient& gradient,
                     const core::objective::ObjectiveConfig& objective);

// Mean over the steps between two lines of the log, as TRL averages: of each key, over the steps that have a finite value.
// num_tokens and epoch are where they stand.
class MetricsAverage {
 public:
  void add(const Metrics& metrics);
  Metrics take();

 private:
  std::map<std::string, std::vector<double>> values_;
};

class MetricsLog {
 public:
  // metrics.jsonl in `folder`, cut to `keep_bytes` (a resumed run), and the sinks. A sink that can't be started or dies is said
  // once on standard error and left out: metrics never stop a run.
  MetricsLog(const std::filesystem::path& folder, int64_t keep_bytes, const std::vector<Sink>& sinks, const std::string& run_name,
             const std::string& config_yaml);
  ~MetricsLog();
  // One line, written whole: {"step": 3, "loss": …}. Values that are not finite are written as null. IoError on a full disk; the
  // lines before are untouched.
  void write(int64_t step, const Metrics& metrics);
  // All lines are on the disk: before a checkpoint counts their bytes.
  void sync();
  int64_t bytes() const;  // of metrics.jsonl so far

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longstraw::training
