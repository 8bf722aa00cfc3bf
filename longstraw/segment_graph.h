#pragma once
// One node of the token tree, run over a prompt state.

#include "longstraw/gradient_store.h"
#include "longstraw/prompt_state.h"
#include "longstraw/segment_execution.h"
#include "longstraw/token_tree.h"

#include "core/model/decoder.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace longstraw {

// A run of the decoder, as those who look on (or change it, in tests) see it.
struct ForwardPass {
  const SegmentExecution::Options& options;
  // By span, the branch whose targets its rows predict; empty where nothing is predicted.
  std::vector<const Branch*> branches;
};
// Called before each run with the execution that carries it out: the decoder is given what comes back instead, which lives until
// its run ends; null: nothing instead.
using Around = std::function<std::unique_ptr<core::model::Execution>(core::model::Execution&, const ForwardPass&)>;

// A node's forward pass: where its adjoint and its loss enter the graph, if it was run with one.
struct SegmentGraph {
  std::vector<SegmentExecution::OwnState> own_state;
  at::Tensor hidden_SD;  // after the final norm; undefined for a run without output
  int64_t mismatches = 0, changed_choices = 0;
};

struct NodeRun {
  SegmentExecution::StateUse use = SegmentExecution::StateUse::kWrite;
  bool with_output = false;            // of a node with a loss
  GradientStore* gradients = nullptr;  // of the graph, if one is made
  core::model::SequenceLengths lengths;
  const Around* around = nullptr;
};

// With gradients enabled, makes the node's graph.
SegmentGraph run_node(const core::model::Decoder& decoder, const Node& node, PromptState& state, const NodeRun& run);

}  // namespace longstraw
