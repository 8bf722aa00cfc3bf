#pragma once
// The definition of right: plain full-graph training. Each response runs whole, behind its whole prompt, as one graph
// with one backward; gradients are summed in float32, or float64 in a float64 run, in the order of the batch.
// Deterministic on one device and thread count. Includes nothing of longstraw/.

#include "core/data/rollouts.h"
#include "core/model/decoder.h"
#include "core/model/step_gradient.h"
#include "core/objective/config.h"
#include "reference/config.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

namespace longstraw::reference {

struct RunOptions {
  Attention attention = Attention::kTextbook;
  // Where the prompt's graph is cut, as a second oracle for the detached and tail arms. The prompt state is what tokens
  // x_0 … x_{P-2} leave (the last prompt token belongs to every response). None: no cut. W: the keys and values of all
  // but the last W tokens of the state are constants for every query, and nothing else is; 0: of all of them.
  std::optional<int64_t> tail_tokens = {};
  bool trace = false;  // StepGradient::traces
};

struct ReferenceOptions {
  RunOptions run;
  core::objective::ObjectiveConfig objective;
  double temperature = 1.0;           // log-probs are of logits divided by it
  int64_t max_completion_length = 1;  // the divisor of dr_grpo
  bool entropy = false;               // StepGradient::entropies, also where the loss doesn't need them
};

// Gradient of the objective over the batch. loss_parts: policy, kl (with β in the loss), entropy (with entropy_coef). seconds:
// total, forward, backward, and scoring where the objective needs scores of the whole batch first. bytes: peak_bytes above what
// was alive at the call. facts: responses, tokens. Throws FormatError for an empty prompt or response and for an id outside
// the vocabulary, ConfigError for an objective that needs what the batch lacks.
core::model::StepGradient reference_gradient(const core::model::Decoder& decoder, const core::data::Batch& batch,
                                             const ReferenceOptions& options);

// Log-probs, and with options.entropy (or where the objective needs them of the whole batch) entropies of the distributions that
// the responses' tokens were drawn from; no graph. The same numbers, bit for bit, as reference_gradient's. Throws as that does.
core::model::TokenScores reference_scores(const core::model::Decoder& decoder, const core::data::Batch& batch,
                                          const ReferenceOptions& options);

// The same gradient with the loss -Σ w_t lp_t instead of an objective; weights [prompt][member][token].
using TokenWeights = std::vector<std::vector<std::vector<double>>>;
core::model::StepGradient weighted_gradient(const core::model::Decoder& decoder, const core::data::Batch& batch,
                                            const TokenWeights& weights, const RunOptions& options, double temperature = 1.0);

// Logits [R, V] that predict the response's tokens (positions P-1 … P+R-2 of the sequence), in the run's dtype. Carries
// a graph when gradients are enabled. `points`: where to trace the pass at these positions; null: not at all.
at::Tensor response_logits(const core::model::Decoder& decoder, std::span<const int64_t> prompt_ids,
                           std::span<const int64_t> completion_ids, core::model::SequenceLengths lengths, const RunOptions& options,
                           core::model::TracePoints* points = nullptr);

}  // namespace longstraw::reference
