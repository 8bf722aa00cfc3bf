#include "longstraw/memory_plan.h"

#include "longstraw/attention_block.h"
#include "longstraw/loss_head.h"
#include "longstraw/prefix_attention.h"

#include "core/device/device.h"

#include <algorithm>
#include <vector>

namespace longstraw {
namespace {

// Elements a token needs; every formula follows the operations of segment_execution.cpp.
class TokenCosts {
 public:
  TokenCosts(const core::model::Architecture& a, c10::ScalarType dtype)
      : a_(a),
        dtype_(dtype),
        size_(static_cast<int64_t>(c10::elementSize(dtype))),
        wide_(static_cast<int64_t>(c10::elementSize(core::device::accumulation_dtype(dtype)))) {}

  // Of all layers with full attention; of one layer with a window.
  int64_t state() const { return std::count(a_.window.begin(), a_.window.end(), std::nullopt) * layer_state(); }
  int64_t layer_state() const { return 2 * keys() * size_; }
  const std::vector<std::optional<int64_t>>& windows() const { return a_.window; }
  int64_t adjoint() const { return a_.layers * 2 * a_.kv_heads * a_.head_dim * wide_; }

  // What one layer's graph keeps for its backward pass: the inputs of both norms, of all projections, of the attention
  // (its output too) and of the gate.
  int64_t layer_graph() const {
    int64_t elements = 4 * a_.hidden + 2 * queries() + 2 * keys() + 3 * a_.intermediate;
    if (a_.query_key_norm) elements += queries() + keys();
    return elements * size_ + (a_.heads + 2) * wide_;
  }
  // Of the last layer when only its keys and values are wanted.
  int64_t state_only_graph() const { return (2 * a_.hidden + 2 * keys()) * size_ + wide_; }
  int64_t graph(bool with_loss) const {
    return with_loss ? a_.layers * layer_graph() + (2 * a_.hidden) * size_ + wide_
                     : (a_.layers - 1) * layer_graph() + state_only_graph();
  }
  // Alive at the widest moment of a forward pass without a graph: the residual stream, and an MLP between its
  // projections.
  int64_t forward_working() const { return (2 * a_.hidden + 3 * a_.intermediate) * size_; }
  // Likewise of a backward pass beyond the graph: the gradients of residual, gate, up and their product.
  int64_t backward_working() const { return (2 * a_.hidden + 3 * a_.intermediate) * size_; }
  // A slice of logits twice: the log-sum-exp needs a copy beside the logits themselves; in a narrow dtype the gradient of
  // the output weight also exists before it is added to its accumulator.
  int64_t head(int64_t tokens) const {
    const int64_t slice = std::min(tokens, logit_rows(a_.vocab)) * a_.vocab;
    const int64_t scores = 2 * slice * wide_;
    const int64_t product = size_ == wide_ ? 0 : slice * (wide_ + size_) + a_.vocab * a_.hidden * size_;
    return std::max(scores, product) + 2 * tokens * a_.hidden * size_;
  }
  // Backward pass of attention over `past` tokens, of which those from `adjoint_from` on want an adjoint: the widest of
  // all kinds of layers.
  int64_t attention_backward(int64_t tokens, int64_t past, int64_t adjoint_from) const {
    int64_t widest = 0;
    for (const auto& window : a_.window) {
      const int64_t unwanted = std::min(past, adjoint_from), wanted = past - unwanted;
      widest = std::max(widest, window && *window < past + tokens
                                    ? windowed(tokens, past, *window)
                                    : std::max(with_adjoint(tokens, wanted), queries_only(tokens, unwanted)));
    }
    // By then the layer's MLP has gone backward and let go of what it kept.
    return widest - tokens * (2 * a_.hidden + 3 * a_.intermediate) * size_;
  }

 private:
  // Gradients of `tokens` queries, of their own keys and values and of a block of the past's.
  int64_t with_adjoint(int64_t tokens, int64_t past) const {
    const int64_t block = std::min(past, kPastBlock);
    return flash_scratch_bytes(tokens, std::max(tokens, block), dtype_) + gradients(tokens, block);
  }
  // Keys that want no adjoint: that backward pass goes tile by tile.
  int64_t queries_only(int64_t tokens, int64_t past) const {
    return past > 0 ? tile_bytes(tokens * a_.heads, past, dtype_) + 4 * tokens * queries() * wide_ : 0;
  }
  // Layers with a window go tile by tile too, a few queries at a time.
  int64_t windowed(int64_t tokens, int64_t past, int64_t window) const {
    const int64_t rows = std::min(tokens, kWindowTile);
    const int64_t visible = std::max(std::min(tokens, window + rows), std::min(past, window));  // own and past are two calls
    return tile_bytes(rows * a_.heads, visible, dtype_) + gradients(tokens, std::min(past, visible));
  }
  int64_t gradients(int64_t tokens, int64_t past) const {
    return (tokens * (3 * queries() + 2 * keys()) + 2 * past * keys()) * size_;
  }
  int64_t queries() const { return a_.heads * a_.head_dim; }
  int64_t keys() const { return a_.kv_heads * a_.head_dim; }

  const core::model::Architecture& a_;
  c10::ScalarType dtype_;
  int64_t size_, wide_;
};

// Follows the sweep, with bytes instead of tensors.
class Walk {
 public:
  Walk(const TokenCosts& costs, const LongstrawConfig& config, const std::unordered_set<const Node*>& keep)
      : costs_(costs), config_(config), keep_(keep) {
    windowed_.resize(std::count_if(costs.windows().begin(), costs.windows().end(), [](const auto& w) { return w.has_value(); }));
  }

  void visit(const Node& node, bool last = true) {
    const auto tokens = static_cast<int64_t>(node.tokens.size());
    const bool kept = keep_.contains(&node);
    const int64_t graph = tokens * costs_.graph(!node.loss.empty());
    if (tokens > 0) {
      write(node);
      if (kept) kept_ += graph;
      top_kept_ = std::max(top_kept_, kept_);
      touch(tokens * costs_.forward_working());
    }
    if (last && !node.carries_gradient) forget_before(node.end());
    replay(node);
    for (const auto& child : node.children) visit(*child, last && child == node.children.back());
    if (node.carries_gradient) {
      const int64_t head = node.loss.empty() ? 0 : costs_.head(tokens);
      touch((kept ? 0 : graph) + widest(tokens, head, node.begin, node.adjoint_from));
      if (kept) kept_ -= graph;
    }
  }

  int64_t peak() const { return peak_; }
  int64_t top_kept() const { return top_kept_; }
  int64_t top_windowed() const { return top_windowed_; }

 private:
  void replay(const Node& node) {
    const auto count = static_cast<int64_t>(node.branches.size());
    for (int64_t first = 0; first < count; first += config_.replay_batch) {
      int64_t tokens = 0;
      for (int64_t i = first; i < std::min(first + config_.replay_batch, count); ++i) {
        tokens += static_cast<int64_t>(node.branches[i].tokens.size());
      }
      touch(tokens * costs_.graph(true) + widest(tokens, costs_.head(tokens), node.end(), node.branches[first].adjoint_from));
    }
  }
  // The widest moment of a backward pass: in the loss, in an MLP, or in an attention.
  int64_t widest(int64_t tokens, int64_t head, int64_t past, int64_t adjoint_from) const {
    return std::max({head, tokens * costs_.backward_working(), costs_.attention_backward(tokens, past, adjoint_from)});
  }
  void touch(int64_t working) {
    peak_ = std::max(peak_, kept_ + windowed_state_ + working);
    top_windowed_ = std::max(top_windowed_, windowed_state_);
  }

  // The blocks of windowed layers, as PromptState keeps them.
  void write(const Node& node) {
    for (auto& blocks : windowed_) {
      std::erase_if(blocks, [&](const auto& block) { return block.first >= node.begin; });
      blocks.emplace_back(node.begin, node.end());
    }
    weigh();
  }
  void forget_before(int64_t position) {
    size_t i = 0;
    for (const auto& window : costs_.windows()) {
      if (window) std::erase_if(windowed_[i++], [&](const auto& block) { return block.second <= position - *window + 1; });
    }
    weigh();
  }
  void weigh() {
    windowed_state_ = 0;
    for (const auto& blocks : windowed_) {
      for (const auto& [begin, end] : blocks) windowed_state_ += (end - begin) * costs_.layer_state();
    }
  }

  const TokenCosts& costs_;
  const LongstrawConfig& config_;
  const std::unordered_set<const Node*>& keep_;
  int64_t kept_ = 0, top_kept_ = 0, peak_ = 0;
  int64_t windowed_state_ = 0, top_windowed_ = 0;
  std::vector<std::vector<std::pair<int64_t, int64_t>>> windowed_;  // by windowed layer, [begin, end) of its blocks
};

void gradient_nodes_in_capture_order(const Node& node, std::vector<const Node*>& nodes) {
  if (node.carries_gradient) nodes.push_back(&node);
  for (const auto& child : node.children) gradient_nodes_in_capture_order(*child, nodes);
}

}  // namespace

MemoryPlan plan_memory(const core::model::Architecture& architecture, c10::ScalarType dtype, int64_t parameters,
                       const TokenTree& tree, const LongstrawConfig& config) {
  const TokenCosts costs(architecture, dtype);
  MemoryPlan plan;
  plan.gradients = parameters * static_cast<int64_t>(c10::elementSize(core::device::accumulation_dtype(dtype)));
  plan.state = tree.state_tokens * costs.state();
  plan.adjoint = (tree.state_tokens - tree.adjoint_begin) * costs.adjoint();
  const int64_t fixed = plan.gradients + plan.state + plan.adjoint;

  std::vector<const Node*> nodes;
  gradient_nodes_in_capture_order(*tree.root, nodes);
  const auto with_last_kept = [&](size_t count) {
    MemoryPlan candidate = plan;
    candidate.keep = {nodes.end() - static_cast<std::ptrdiff_t>(count), nodes.end()};
    Walk walk(costs, config, candidate.keep);
    walk.visit(*tree.root);
    candidate.kept_graphs = walk.top_kept();
    candidate.peak = fixed + walk.peak();
    candidate.state += walk.top_windowed();
    candidate.working = std::max<int64_t>(0, walk.peak() - walk.top_kept() - walk.top_windowed());
    return candidate;
  };
  // Largest count of kept graphs within the budget; the peak never falls when more are kept.
  size_t low = 0, high = nodes.size();
  while (low < high) {
    const size_t middle = (low + high + 1) / 2;
    if (with_last_kept(middle).peak <= static_cast<int64_t>(config.memory_budget.count)) low = middle;
    else high = middle - 1;
  }
  return with_last_kept(low);
}

}  // namespace longstraw
