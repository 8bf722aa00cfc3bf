#pragma once
// What a run leaves behind while it goes: metrics.jsonl and the sinks, the record, and lines on the terminal.

#include "core/record/writer.h"
#include "training/metrics.h"
#include "training/record_step.h"
#include "training/settings.h"

#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::training {

struct JournalOptions {
  const Settings& settings;
  std::string model_sha256, data_sha256;
  int64_t resumed_step = 0;   // optimizer steps taken before
  int64_t metrics_bytes = 0;  // of metrics.jsonl that stay
  int64_t total_steps = 0;
  nlohmann::json unlogged;  // of a checkpoint: what unlogged() gave
};

// Steps are counted from 1 here and in the record: step n is what was done on the way to n optimizer steps taken.
class Journal {
 public:
  Journal(const JournalOptions& options, const Hooks& hooks);

  // Rewards of a generation's responses, or of an evaluation.
  void rewards(const core::data::Batch& batch, int64_t step, const std::string& split, const std::vector<std::string>& names);
  void gradient(int64_t step, const RecordedGradient& gradient);
  // Figures of an optimizer step; every logging_steps-th is written, with the means since the one before. `latest`: figures that
  // are not averaged (learning_rate, epoch, …).
  void step(int64_t step, const Metrics& metrics, const Metrics& latest);
  void evaluation(int64_t step, const Metrics& metrics);
  // Everything so far is on the disk.
  void sync();
  void close();

  int64_t metrics_bytes() const { return log_.bytes(); }
  // Steps since the last written line, for a checkpoint.
  nlohmann::json unlogged() const;

 private:
  void say_step(int64_t step, const Metrics& metrics);

  const Settings& settings_;
  const Hooks& hooks_;
  int64_t first_step_, total_steps_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  MetricsLog log_;
  core::record::RecordWriter record_;
  std::vector<Metrics> unlogged_;
  double last_reward_ = 0.0, last_length_ = 0.0;
};

}  // namespace longstraw::training
