#pragma once
// How many bytes a step will need, by category, and which segments may keep their graph between capture and sweep.
//
// The plan walks the token tree as the sweep will (sweep.h) and adds up what is alive. Peak bytes are those the allocator
// hands out above the weights: what MemoryMeter measures. Within a budget the plan keeps the graphs of the last captured
// segments: they are the first to be swept, and their bytes are free again when earlier segments are recomputed.

#include "longstraw/token_tree.h"

#include "core/model/decoder.h"

#include <cstdint>
#include <set>
#include <unordered_set>

namespace longstraw {

struct MemoryPlan {
  int64_t gradients = 0;  // the store, float32 or float64
  int64_t state = 0;      // rows, carried values and experts along the longest path
  int64_t adjoint = 0;
  int64_t kept_graphs = 0;  // largest sum of kept graphs alive at once
  int64_t working = 0;      // peak less all of the above: one segment's or replay's graph and its backward pass
  int64_t peak = 0;
  std::unordered_set<const Node*> keep;
};

// `captured_graphs`: the tree's one prompt was captured before, with the graphs of its segments that begin there; the budget is
// then for those of long responses.
MemoryPlan plan_memory(const core::model::Decoder& decoder, const TokenTree& tree, const LongstrawConfig& config,
                       const std::set<int64_t>* captured_graphs = nullptr);

}  // namespace longstraw
