#pragma once
// One optimizer step's gradient by capture, replay and sweep.

#include "longstraw/captured_prompt.h"
#include "longstraw/config.h"
#include "longstraw/objective.h"

#include "core/data/rollouts.h"
#include "core/model/decoder.h"
#include "core/model/step_gradient.h"

#include <functional>
#include <vector>

namespace longstraw {

struct TrainerOptions {
  LongstrawConfig longstraw;
  core::objective::ObjectiveConfig objective;
  double temperature = 1.0;
  int64_t max_completion_length = 64;  // of dr_grpo's denominator
  std::function<void(const char* phase, int64_t tokens)> progress;
  bool trace = false;    // StepGradient::traces
  bool entropy = false;  // StepGradient::entropies
  // Parallel to the batch, or empty: prompts that were run already, at these weights; null: not this one. A step with
  // captured prompts walks each prompt by itself, others share nodes with prompts that begin alike.
  std::vector<CapturedPrompt*> captured;
};

// The GRPO gradient of `batch`. Runs a scoring pass first where the objective needs one. Seconds: capture, replay, sweep, total
// (and scoring). Bytes: peak_bytes (measured, above the weights, captured prompts included), planned_peak_bytes and the plan's
// categories. Facts: tree and recompute counts; recompute_mismatches is 0 in a run that repeated its captured state bit for bit;
// captured_tokens counts prompt tokens that this call ran forward for their state, so it is 0 where all were captured before,
// reused_tokens those whose state was there, kept_tokens and recomputed_tokens those that a gradient was walked back over, with
// the graph of their capture or with a new one; stale_prompts counts captured prompts of other weights than the model has now.
core::model::StepGradient longstraw_gradient(const core::model::Decoder& decoder, const core::data::Batch& batch,
                                             const TrainerOptions& options);

// The same for any objective that is a sum over tokens.
core::model::StepGradient longstraw_gradient(const core::model::Decoder& decoder, const core::data::Batch& batch,
                                             const TokenObjective& objective, const TrainerOptions& options);

// Log-probs of the batch's responses, without autograd, over the same prompt state that training uses; with options.entropy, or
// where the objective needs them, entropies too.
core::model::TokenScores longstraw_scores(const core::model::Decoder& decoder, const core::data::Batch& batch,
                                          const TrainerOptions& options);

// Shortest and longest prompt with response.
core::model::SequenceLengths sequence_lengths(const core::data::Batch& batch);

}  // namespace longstraw
