#include "longstraw/trainer.h"

#include "longstraw/gradient_store.h"
#include "longstraw/memory_plan.h"
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
  plain.longstraw.replay_batch = 1;
  plain.longstraw.memory_budget = {0};
  plain.longstraw.segment_tokens = std::max<int64_t>(1, options.longstraw.segment_tokens * 2 / 3);
  return longstraw_gradient(decoder, batch, objective, plain);
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

StepGradient longstraw_gradient(const Decoder& decoder, const Batch& batch, const TrainerOptions& options) {
  const GrpoObjective objective(batch, options.objective, options.temperature, options.max_completion_length);
  StepGradient result = longstraw_gradient(decoder, batch, objective, options);
  result.advantages = objective.advantages();
  return result;
}

StepGradient longstraw_gradient(const Decoder& decoder, const Batch& batch, const TokenObjective& objective,
                                const TrainerOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const core::device::MemoryMeter meter(decoder.device());
  const int64_t live_before = meter.live_bytes();
  meter.reset_peak();

  StepGradient result;
  const TokenTree tree = build_token_tree(batch, options.longstraw);
  const MemoryPlan plan = plan_memory(decoder, tree, options.longstraw);
  GradientStore gradients(decoder);
  StepTracer tracer;
  SweepOptions how{
      .replay_batch = options.longstraw.replay_batch, .lengths = sequence_lengths(batch), .progress = options.progress};
  if (options.trace) how.around = [&tracer](auto& execution, const auto& pass) { return tracer.around(execution, pass); };
  const SweepResult swept = sweep(decoder, batch, tree, objective, plan, how, gradients);
  result.gradients = gradients.release();
  result.loss = swept.policy + swept.kl;
  result.loss_parts = {{"policy", swept.policy}, {"kl", swept.kl}};
  result.logprobs = swept.logprobs;
  if (options.trace) result.traces = tracer.traces(batch);
  result.bytes = {{"peak_bytes", meter.peak_bytes() - live_before},
                  {"planned_peak_bytes", plan.peak},
                  {"gradient_bytes", plan.gradients},
                  {"state_bytes", swept.state_bytes},
                  {"adjoint_bytes", swept.adjoint_bytes},
                  {"kept_graph_bytes", plan.kept_graphs},
                  {"working_bytes", plan.working}};
  result.facts = {{"segments", static_cast<double>(tree.nodes)},
                  {"captured_tokens", static_cast<double>(swept.captured_tokens)},
                  {"replayed_tokens", static_cast<double>(swept.replayed_tokens)},
                  {"recomputed_tokens", static_cast<double>(swept.recomputed_tokens)},
                  {"kept_tokens", static_cast<double>(swept.kept_tokens)},
                  {"recompute_mismatches", static_cast<double>(swept.recompute_mismatches)},
                  {"changed_choices", static_cast<double>(swept.changed_choices)}};
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
