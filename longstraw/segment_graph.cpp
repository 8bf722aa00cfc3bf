#include "longstraw/segment_graph.h"

#include "longstraw/run_layers.h"

namespace longstraw {

SegmentGraph run_node(const core::model::Decoder& decoder, const Node& node, PromptState& state, const NodeRun& run) {
  const auto tokens = static_cast<int64_t>(node.tokens.size());
  const SegmentExecution::Options options{.spans = {{0, tokens}},
                                          .past = {&state, node.begin, node.carries_gradient ? node.adjoint_from : INT64_MAX},
                                          .state_use = run.use,
                                          .gradients = run.gradients};
  SegmentExecution execution(options);
  ForwardPass pass{options, {}};
  if (run.with_output) pass.branches = {&node.loss.front()};
  const auto around = run.around != nullptr && *run.around ? (*run.around)(execution, pass) : nullptr;
  core::model::Execution& outermost = around ? *around : execution;
  const auto positions = positions_from(node.begin, tokens);
  SegmentGraph graph;
  graph.hidden_SD = run_layers(decoder, node.tokens, positions, run.lengths, outermost, run.with_output);
  graph.own_state = execution.own_state();
  graph.mismatches = execution.mismatches();
  graph.changed_choices = execution.changed_choices();
  return graph;
}

}  // namespace longstraw
