#include "training/journal.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <utility>

namespace longstraw::training {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// A killed run loses its rows since the last checkpoint anyway.
constexpr double kRowsWait = 2.0;

core::record::RecordHeader header_of(const JournalOptions& options) {
  const Settings& settings = options.settings;
  return {.arm = std::string(core::config::name_of(settings.train.arm)),
          .config_yaml = settings.config_yaml,
          .model_sha256 = options.model_sha256,
          .data_sha256 = options.data_sha256,
          .dtype = std::string(core::config::name_of(settings.model.dtype)),
          .device = settings.model.device == "cpu" ? "cpu" : "cuda",
          .world_size = 1,
          .seed = int64_t(settings.train.seed),
          .torch_version = settings.torch_version,
          .git_commit = settings.git_commit,
          .deterministic = true,
          .extra = {}};
}

// JSON has no number for what is not finite.
json number(double value) { return std::isfinite(value) ? json(value) : json(fmt::format("{}", value)); }
double number_from(const json& value) {
  if (value.is_number()) return value.get<double>();
  const auto text = value.get<std::string>();
  if (text == "inf") return std::numeric_limits<double>::infinity();
  return text == "-inf" ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
}

double of(const Metrics& metrics, const std::string& name, double otherwise) {
  const auto found = metrics.find(name);
  return found == metrics.end() ? otherwise : found->second;
}

std::string clock_time(double seconds) {
  const auto whole = int64_t(seconds);
  if (whole >= 3600) return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

}  // namespace

Journal::Journal(const JournalOptions& options, const Hooks& hooks)
    : settings_(options.settings),
      hooks_(hooks),
      first_step_(options.resumed_step),
      total_steps_(options.total_steps),
      log_(options.settings.train.output_dir, options.metrics_bytes, options.settings.train.report_to,
           fs::path(options.settings.train.output_dir).filename().string(), options.settings.config_yaml),
      record_((fs::path(options.settings.train.output_dir) / "record.h5").string(), header_of(options),
              {.resume_from_step = options.resumed_step + 1, .rows_wait_seconds = kRowsWait}) {
  if (!options.unlogged.is_array()) return;
  for (const json& step : options.unlogged) {
    Metrics& metrics = unlogged_.emplace_back();
    for (const auto& [name, value] : step.items()) metrics[name] = number_from(value);
  }
}

void Journal::rewards(const core::data::Batch& batch, int64_t step, const std::string& split,
                      const std::vector<std::string>& names) {
  record_.append_rewards(reward_rows(batch, step, split, names));
}

void Journal::gradient(int64_t step, const RecordedGradient& gradient) {
  core::record::StepWriter out = record_.begin_step(step);
  write_step(out, gradient);
  out.commit();
}

void Journal::step(int64_t step, const Metrics& metrics, const Metrics& latest) {
  unlogged_.push_back(metrics);
  if (step % settings_.train.logging_steps != 0 && step != total_steps_) return;
  MetricsAverage average;
  for (const Metrics& one : unlogged_) average.add(one);
  unlogged_.clear();
  Metrics line = average.take();
  for (const auto& [name, value] : latest) line[name] = value;
  log_.write(step, line);
  record_.append_metrics(step, line);
  say_step(step, line);
}

void Journal::evaluation(int64_t step, const Metrics& metrics) {
  log_.write(step, metrics);
  record_.append_metrics(step, metrics);
  hooks_.say(fmt::format("step {}/{}  evaluation: reward {:.4g}  length {:.1f}", step, total_steps_,
                         of(metrics, "eval_reward", NAN), of(metrics, "eval_completions/mean_length", NAN)));
}

void Journal::sync() {
  log_.sync();
  record_.publish();
}

void Journal::close() { record_.close(); }

json Journal::unlogged() const {
  json steps = json::array();
  for (const Metrics& metrics : unlogged_) {
    json step = json::object();
    for (const auto& [name, value] : metrics) step[name] = number(value);
    steps.push_back(std::move(step));
  }
  return steps;
}

void Journal::say_step(int64_t step, const Metrics& metrics) {
  last_reward_ = of(metrics, "reward", last_reward_);
  last_length_ = of(metrics, "completions/mean_length", last_length_);
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  const double left = elapsed / double(step - first_step_) * double(total_steps_ - step);
  hooks_.say(fmt::format("step {}/{}  loss {:.4g}  reward {:.4g}  length {:.1f}  {:.2f} s  {} left", step, total_steps_,
                         of(metrics, "loss", NAN), last_reward_, last_length_, of(metrics, "step_time", NAN), clock_time(left)));
}

}  // namespace longstraw::training
