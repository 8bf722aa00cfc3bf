#include "longstraw/trainer.h"

#include "longstraw/gradient_store.h"
#include "longstraw/memory_plan.h"
#include "longstraw/prompt_capture.h"
#include "longstraw/step_trace.h"
#include "longstraw/sweep.h"
#include "longstraw/token_tree.h"

#include "core/base/errors.h"
#include "core/device/memory_meter.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace longstraw {
namespace {

using core::data::Batch;
using core::model::Decoder;
using core::model::StepGradient;

double relative_distance(const std::vector<at::Tensor>& of, const std::vector<at::Tensor>& from) {
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < of.size(); ++i) {
    difference += (of[i].to(at::kDouble) - from[i].to(at::kDouble)).square().sum().item<double>();
    norm += from[i].to(at::kDouble).square().sum().item<double>();
  }
  return norm > 0.0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

// The plain way: one response at a time, every segment recomputed, other segment borders.
StepGradient plain_gradient(const Decoder& decoder, const Batch& batch, const TokenObjective& objective,
                            const TrainerOptions& options) {
  TrainerOptions plain = options;
  plain.longstraw.self_check = SelfCheck::kOff;
  plain.trace = false;
  plain.captured.clear();
  plain.longstraw.replay_batch = 1;
  plain.longstraw.memory_budget = {0};
  plain.longstraw.segment_tokens = std::max<int64_t>(1, options.longstraw.segment_tokens * 2 / 3);
  return longstraw_gradient(decoder, batch, objective, plain);
}

// Prompts that are walked together: one that was captured before, or all that were not.
struct Walk {
  std::vector<int64_t> prompts;
  CapturedPrompt* captured = nullptr;
  int64_t held = 0;  // bytes of the captured one, before the walk
  TokenTree tree;
  MemoryPlan plan;
};

std::vector<Walk> cut_into_walks(const Decoder& decoder, const Batch& batch, const TrainerOptions& options) {
  if (!options.captured.empty() && options.captured.size() != batch.size()) {
    throw ConfigError(fmt::format("captured prompts: {} for a batch of {}", options.captured.size(), batch.size()));
  }
  std::vector<Walk> walks;
  std::optional<size_t> others;  // in the place of the first of them
  for (size_t i = 0; i < batch.size(); ++i) {
    CapturedPrompt* const captured = options.captured.empty() ? nullptr : options.captured[i];
    if (captured != nullptr) {
      captured->check_usable();
      captured->check_fits(batch[i], options.longstraw);
      walks.push_back({.prompts = {}, .captured = captured, .held = captured->held_bytes(), .tree = {}, .plan = {}});
    } else if (!others) {
      others = walks.size();
      walks.emplace_back();
    }
    walks[captured != nullptr ? walks.size() - 1 : *others].prompts.push_back(static_cast<int64_t>(i));
  }
  for (Walk& walk : walks) {
    walk.tree = build_token_tree(batch, walk.prompts, options.longstraw);
    std::set<int64_t> kept;
    if (walk.captured != nullptr) {
      for (const auto& [begin, graph] : walk.captured->capture().kept) kept.insert(begin);
    }
    walk.plan = plan_memory(decoder, walk.tree, options.longstraw, walk.captured != nullptr ? &kept : nullptr);
  }
  return walks;
}

// Held by captured prompts; one may serve several groups of a batch.
int64_t held_bytes(const std::vector<CapturedPrompt*>& captured) {
  int64_t bytes = 0;
  for (const CapturedPrompt* prompt : std::set<const CapturedPrompt*>(captured.begin(), captured.end())) {
    if (prompt != nullptr) bytes += prompt->held_bytes();
  }
  return bytes;
}

SweepResult sweep_all(const Decoder& decoder, const Batch& batch, const std::vector<Walk>& walks, const TokenObjective& objective,
                      const TrainerOptions& options, GradientStore* gradients, StepTracer* tracer) {
  SweepResult result;
  for (const Walk& walk : walks) {
    SweepOptions how{.replay_batch = options.longstraw.replay_batch,
                     .lengths = walk.captured != nullptr ? walk.captured->lengths() : sequence_lengths(batch),
                     .entropy = options.entropy,
                     .captured = walk.captured != nullptr ? &walk.captured->capture() : nullptr,
                     .stale = walk.captured != nullptr && !walk.captured->is_current(),
                     .progress = options.progress};
    if (tracer != nullptr) {
      how.around = [tracer](auto& execution, const auto& pass) { return tracer->around(execution, pass); };
    }
    sweep({decoder, batch, walk.tree, objective, walk.plan, how, gradients}, result);
  }
  return result;
}

// What a step adds up to over its walks, which come one after another.
std::map<std::string, int64_t> planned_bytes(const std::vector<Walk>& walks, const SweepResult& swept, int64_t held) {
  std::map<std::string, int64_t> bytes{
      {"planned_peak_bytes", 0}, {"gradient_bytes", 0}, {"state_bytes", swept.state_bytes}, {"adjoint_bytes", swept.adjoint_bytes},
      {"kept_graph_bytes", 0},   {"working_bytes", 0}};
  for (const Walk& walk : walks) {
    const auto raise = [&](const char* name, int64_t value) { bytes[name] = std::max(bytes[name], value); };
    // A walk's plan has its own prompt's state and graphs already.
    raise("planned_peak_bytes", walk.plan.peak + held - walk.held);
    raise("gradient_bytes", walk.plan.gradients);
    raise("kept_graph_bytes", walk.plan.kept_graphs);
    raise("working_bytes", walk.plan.working);
  }
  return bytes;
}

std::map<std::string, double> facts_of(const std::vector<Walk>& walks, const SweepResult& swept) {
  int64_t segments = 0, stale = 0;
  for (const Walk& walk : walks) {
    segments += walk.tree.nodes;
    if (walk.captured != nullptr && !walk.captured->is_current()) ++stale;
  }
  return {{"segments", static_cast<double>(segments)},
          {"captured_tokens", static_cast<double>(swept.captured_tokens)},
          {"reused_tokens", static_cast<double>(swept.reused_tokens)},
          {"replayed_tokens", static_cast<double>(swept.replayed_tokens)},
          {"recomputed_tokens", static_cast<double>(swept.recomputed_tokens)},
          {"kept_tokens", static_cast<double>(swept.kept_tokens)},
          {"recompute_mismatches", static_cast<double>(swept.recompute_mismatches)},
          {"changed_choices", static_cast<double>(swept.changed_choices)},
          {"stale_prompts", static_cast<double>(stale)}};
}

// Has no gradient, and no loss: what is left is log-probs and entropies.
class Scores final : public TokenObjective {
 public:
  Scores(double temperature, bool entropy) : temperature_(temperature), entropy_(entropy) {}
  TokenLoss token(int64_t, int64_t, int64_t, double, double) const override { return {}; }
  bool has_gradient(int64_t, int64_t) const override { return false; }
  double temperature() const override { return temperature_; }
  bool wants_entropy() const override { return entropy_; }

 private:
  double temperature_;
  bool entropy_;
};

// The scoring pass of a step, and what it adds to the step's figures.
struct Scored {
  core::model::TokenScores scores;
  double seconds = 0.0;
  int64_t peak_bytes = 0;
  int64_t captured_tokens = 0;
};

Scored score(const Decoder& decoder, const Batch& batch, const TrainerOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const core::device::MemoryMeter meter(decoder.device());
  const int64_t before = meter.live_bytes() - held_bytes(options.captured);
  meter.reset_peak();
  const Scores objective(options.temperature, options.entropy || options.objective.top_entropy_quantile < 1.0);
  SweepResult swept =
      sweep_all(decoder, batch, cut_into_walks(decoder, batch, options), objective, options, /*gradients=*/nullptr, nullptr);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return {.scores = {std::move(swept.logprobs), std::move(swept.entropies)},
          .seconds = seconds.count(),
          .peak_bytes = meter.peak_bytes() - before,
          .captured_tokens = swept.captured_tokens};
}

}  // namespace

core::model::SequenceLengths sequence_lengths(const Batch& batch) {
  core::model::SequenceLengths lengths{INT64_MAX, 0};
  for (const auto& group : batch) {
    for (const auto& response : group.responses) {
      const auto length = static_cast<int64_t>(group.prompt_ids.size() + response.completion_ids.size());
      lengths.shortest = std::min(lengths.shortest, length);
      lengths.longest = std::max(lengths.longest, length);
    }
  }
  return lengths;
}

core::model::TokenScores longstraw_scores(const Decoder& decoder, const Batch& batch, const TrainerOptions& options) {
  return score(decoder, batch, options).scores;
}

StepGradient longstraw_gradient(const Decoder& decoder, const Batch& batch, const TrainerOptions& options) {
  Scored scored;
  const bool scores_first = needs_scores(batch, options.objective);
  if (scores_first) scored = score(decoder, batch, options);
  const GrpoObjective objective(batch, options.objective, options.temperature, options.max_completion_length, scored.scores,
                                options.entropy || options.objective.entropy_coef > 0.0);
  StepGradient result = longstraw_gradient(decoder, batch, objective, options);
  result.advantages = objective.advantages();
  if (scores_first) {
    result.seconds["scoring"] = scored.seconds;
    result.seconds["total"] += scored.seconds;
    result.bytes["peak_bytes"] = std::max(result.bytes["peak_bytes"], scored.peak_bytes);
    result.facts["captured_tokens"] += static_cast<double>(scored.captured_tokens);
  }
  return result;
}

StepGradient longstraw_gradient(const Decoder& decoder, const Batch& batch, const TokenObjective& objective,
                                const TrainerOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const core::device::MemoryMeter meter(decoder.device());
  const int64_t held = held_bytes(options.captured);
  const int64_t live_before = meter.live_bytes() - held;
  meter.reset_peak();

  StepGradient result;
  const std::vector<Walk> walks = cut_into_walks(decoder, batch, options);
  GradientStore gradients(decoder);
  StepTracer tracer;
  SweepResult swept = sweep_all(decoder, batch, walks, objective, options, &gradients, options.trace ? &tracer : nullptr);
  result.gradients = gradients.release();
  result.loss = swept.policy + swept.kl + swept.entropy;
  result.loss_parts = {{"policy", swept.policy}, {"kl", swept.kl}};
  if (options.objective.entropy_coef > 0.0 || swept.entropy != 0.0) result.loss_parts["entropy"] = swept.entropy;
  if (options.trace) result.traces = tracer.traces(batch);
  result.bytes = planned_bytes(walks, swept, held);
  result.bytes["peak_bytes"] = meter.peak_bytes() - live_before;
  result.facts = facts_of(walks, swept);
  result.logprobs = std::move(swept.logprobs);
  result.entropies = std::move(swept.entropies);
  const std::chrono::duration<double> total = std::chrono::steady_clock::now() - start;
  result.seconds = {{"capture", swept.capture_seconds},
                    {"replay", swept.replay_seconds},
                    {"sweep", swept.sweep_seconds},
                    {"total", total.count()}};
  if (options.longstraw.self_check == SelfCheck::kFirstStep) {
    result.facts["self_check_relative_l2"] =
        relative_distance(result.gradients, plain_gradient(decoder, batch, objective, options).gradients);
  }
  return result;
}

}  // namespace longstraw
