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
// recompute leaves and chooses is compared with the captured bits, and differences are counted.

#include "longstraw/gradient_store.h"
#include "longstraw/memory_plan.h"
#include "longstraw/objective.h"
#include "longstraw/prompt_state.h"
#include "longstraw/segment_execution.h"
#include "longstraw/token_tree.h"

#include "core/model/decoder.h"

#include <functional>
#include <memory>
#include <vector>

namespace longstraw {

struct SweepResult {
  double policy = 0.0;
  double kl = 0.0;
  std::vector<std::vector<std::vector<double>>> logprobs;  // [prompt][member][token]
  double capture_seconds = 0.0, replay_seconds = 0.0, sweep_seconds = 0.0;
  int64_t recompute_mismatches = 0;            // parts of segments' states whose recomputed values differed from the captured bits
  int64_t changed_choices = 0;                 // routers and indexers of segments that chose otherwise at recompute
  int64_t state_bytes = 0, adjoint_bytes = 0;  // largest, as held by the prompt state
  int64_t captured_tokens = 0, replayed_tokens = 0, recomputed_tokens = 0, kept_tokens = 0;
};

// A run of the decoder in a sweep, as SweepOptions::around sees it.
struct ForwardPass {
  const SegmentExecution::Options& options;
  // By span, the branch whose targets its rows predict; empty where nothing is predicted.
  std::vector<const Branch*> branches;
};

struct SweepOptions {
  int64_t replay_batch = 1;
  core::model::SequenceLengths lengths;
  // Called after each capture, replay and backward with the tokens run so far.
  std::function<void(const char* phase, int64_t tokens)> progress;
  // Called before a node's backward pass, when the adjoint of its own tokens is complete.
  std::function<void(const Node&, const PromptState&)> before_backward;
  // Called before each run of the decoder with the execution that carries it out: the decoder is given what comes back
  // instead, which lives until its run ends; null: nothing instead.
  std::function<std::unique_ptr<core::model::Execution>(core::model::Execution&, const ForwardPass&)> around;
};

// Adds the gradient of `objective` over `tree` to `gradients`. Log-probs come back for every token of `batch`.
SweepResult sweep(const core::model::Decoder& decoder, const core::data::Batch& batch, const TokenTree& tree,
                  const TokenObjective& objective, const MemoryPlan& plan, const SweepOptions& options, GradientStore& gradients);

}  // namespace longstraw
