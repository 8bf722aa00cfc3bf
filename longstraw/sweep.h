#pragma once
// The one algorithm of LongStraw. Over a token tree (token_tree.h), depth first:
//
//   visit(node):
//     capture what the node's tokens leave into the prompt state      (without a graph, unless the plan keeps it)
//     replay the node's branches, a few responses at a time           (their gradients and adjoints are added)
//     visit the children
//     if gradients reach the node: run it again with a graph, attach its adjoint (and its loss), go backward
//
// Peak memory is the state and adjoint of one path and one segment's graph: it does not depend on the number of
// responses. "Exact" is exact for the graph with its discrete choices (experts, selected keys) as they were captured; what a
// recompute leaves and chooses is compared with the captured bits, and differences are counted. A prompt that was captured before
// (prompt_capture.h) is not captured again, and is left as it was found.

#include "longstraw/gradient_store.h"
#include "longstraw/memory_plan.h"
#include "longstraw/objective.h"
#include "longstraw/prompt_state.h"
#include "longstraw/segment_graph.h"
#include "longstraw/token_tree.h"

#include "core/model/decoder.h"

#include <functional>
#include <vector>

namespace longstraw {

struct PromptCapture;

using TokenValues = std::vector<std::vector<std::vector<double>>>;  // [prompt][member][token]

struct SweepResult {
  double policy = 0.0;
  double kl = 0.0;
  double entropy = 0.0;  // the bonus, as a part of the loss
  TokenValues logprobs;
  TokenValues entropies;  // empty unless they were asked for
  double capture_seconds = 0.0, replay_seconds = 0.0, sweep_seconds = 0.0;
  int64_t recompute_mismatches = 0;            // parts of segments' states whose recomputed values differed from the captured bits
  int64_t changed_choices = 0;                 // routers and indexers of segments that chose otherwise at recompute
  int64_t state_bytes = 0, adjoint_bytes = 0;  // largest, as held by the prompt state
  int64_t captured_tokens = 0, replayed_tokens = 0, recomputed_tokens = 0, kept_tokens = 0;
  int64_t reused_tokens = 0;  // of captured prompts
  int64_t swept_tokens = 0;
};

struct SweepOptions {
  int64_t replay_batch = 1;
  core::model::SequenceLengths lengths;
  bool entropy = false;  // SweepResult::entropies, also where the objective does not want them
  // The state of the tree's prompt, which must be its only one; it may be of other weights where `stale`.
  PromptCapture* captured = nullptr;
  bool stale = false;
  // Called after each capture, replay and backward with the tokens run so far.
  std::function<void(const char* phase, int64_t tokens)> progress;
  // Called before a node's backward pass, when the adjoint of its own tokens is complete.
  std::function<void(const Node&, const PromptState&)> before_backward;
  Around around;
};

// Adds the gradient of `objective` over `tree` to `gradients`. Log-probs come back for every token of `batch` in the tree.
SweepResult sweep(const core::model::Decoder& decoder, const core::data::Batch& batch, const TokenTree& tree,
                  const TokenObjective& objective, const MemoryPlan& plan, const SweepOptions& options, GradientStore& gradients);

// The same, adding to what `result` has of other trees of the batch. Without `gradients` no pass has a graph: losses, log-probs and
// entropies alone.
struct SweepInput {
  const core::model::Decoder& decoder;
  const core::data::Batch& batch;
  const TokenTree& tree;
  const TokenObjective& objective;
  const MemoryPlan& plan;
  const SweepOptions& options;
  GradientStore* gradients = nullptr;
};
void sweep(const SweepInput& input, SweepResult& result);

}  // namespace longstraw
