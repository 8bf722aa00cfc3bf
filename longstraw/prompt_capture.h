#pragma once
// What a captured prompt (captured_prompt.h) keeps for the sweeps that use it: its state and, within a budget, graphs of its last
// segments. A graph is walked back over once; after that its segment is recomputed like any other.

#include "longstraw/config.h"
#include "longstraw/gradient_store.h"
#include "longstraw/prompt_state.h"
#include "longstraw/segment_graph.h"
#include "longstraw/token_tree.h"

#include "core/model/decoder.h"

#include <cstdint>
#include <functional>
#include <map>

namespace longstraw {

struct PromptCapture {
  PromptState state;
  GradientStore gradients;               // of the graphs: passes on to the store of the sweep that uses them
  std::map<int64_t, SegmentGraph> kept;  // by the first position of the segment
  int64_t tokens = 0;                    // run forward, those of the state
  int64_t graph_bytes = 0;               // of the kept graphs, as planned
};

}  // namespace longstraw
