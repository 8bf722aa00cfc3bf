#include "longstraw/memory_plan.h"

#include "longstraw/token_costs.h"

#include "core/device/device.h"

#include <algorithm>
#include <iterator>
#include <vector>

namespace longstraw {
namespace {

// Follows the sweep, with bytes instead of tensors.
class Walk {
 public:
  Walk(const TokenCosts& costs, const LongstrawConfig& config, const std::unordered_set<const Node*>& keep, bool captured)
      : costs_(costs), config_(config), keep_(keep), captured_(captured), windowed_(costs.windowed().size()) {}

  void visit(const Node& node, bool last = true) {
    const auto tokens = static_cast<int64_t>(node.tokens.size());
    const bool kept = keep_.contains(&node);
    const int64_t graph = tokens * costs_.graph(!node.loss.empty());
    if (tokens > 0) {
      write(node);
      borders_.push_back(node.end());
      if (kept) kept_ += graph;
      top_kept_ = std::max(top_kept_, kept_);
      if (!captured_ || !node.loss.empty()) touch(tokens * costs_.forward_working());
    }
    if (last && !node.carries_gradient) forget_before(node.end());
    replay(node);
    for (const auto& child : node.children) visit(*child, last && child == node.children.back());
    if (node.carries_gradient) {
      const int64_t head = node.loss.empty() ? 0 : costs_.head(tokens);
      touch((kept ? 0 : graph) + widest(tokens, head, node.begin, node.adjoint_from));
      if (kept) kept_ -= graph;
    }
    if (!borders_.empty() && borders_.back() == node.end()) borders_.pop_back();
  }

  int64_t peak() const { return peak_; }
  int64_t top_kept() const { return top_kept_; }
  int64_t top_moving() const { return top_moving_; }

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
    return std::max({head, tokens * costs_.backward_working() + costs_.scan_backward(tokens),
                     costs_.mixer_backward(tokens, past, adjoint_from)});
  }
  void touch(int64_t working) {
    // Of the borders' adjoints only the two that a segment lies between are alive.
    const int64_t borders = static_cast<int64_t>(borders_.size()) * costs_.border();
    const int64_t moving = windowed_state_ + borders;
    peak_ = std::max(peak_, kept_ + moving + (borders > 0 ? 2 * costs_.border_adjoint() : 0) + working);
    top_moving_ = std::max(top_moving_, moving);
  }

  // The blocks of windowed slots, as PromptState keeps them.
  void write(const Node& node) {
    for (auto& blocks : windowed_) {
      std::erase_if(blocks, [&](const auto& block) { return block.first >= node.begin; });
      blocks.emplace_back(node.begin, node.end());
    }
    weigh();
  }
  void forget_before(int64_t position) {
    for (size_t i = 0; i < windowed_.size(); ++i) {
      const int64_t window = costs_.windowed()[i].window;
      std::erase_if(windowed_[i], [&](const auto& block) { return block.second <= position - window + 1; });
    }
    std::erase_if(borders_, [&](int64_t border) { return border < position; });
    weigh();
  }
  void weigh() {
    windowed_state_ = 0;
    for (size_t i = 0; i < windowed_.size(); ++i) {
      for (const auto& [begin, end] : windowed_[i]) windowed_state_ += (end - begin) * costs_.windowed()[i].row;
    }
  }

  const TokenCosts& costs_;
  const LongstrawConfig& config_;
  const std::unordered_set<const Node*>& keep_;
  bool captured_;
  int64_t kept_ = 0, top_kept_ = 0, peak_ = 0;
  int64_t windowed_state_ = 0, top_moving_ = 0;
  std::vector<std::vector<std::pair<int64_t, int64_t>>> windowed_;  // by windowed slot, [begin, end) of its blocks
  std::vector<int64_t> borders_;                                    // along the path, where carried values are kept
};

void gradient_nodes_in_capture_order(const Node& node, std::vector<const Node*>& nodes) {
  if (node.carries_gradient) nodes.push_back(&node);
  for (const auto& child : node.children) gradient_nodes_in_capture_order(*child, nodes);
}

}  // namespace

MemoryPlan plan_memory(const core::model::Decoder& decoder, const TokenTree& tree, const LongstrawConfig& config,
                       const std::set<int64_t>* captured_graphs) {
  const TokenCosts costs(decoder);
  MemoryPlan plan;
  for (const auto& parameter : decoder.parameters()) plan.gradients += parameter->value.numel();
  plan.gradients *= static_cast<int64_t>(c10::elementSize(core::device::accumulation_dtype(decoder.dtype())));
  plan.state = tree.state_tokens * costs.state() + (tree.state_tokens - tree.adjoint_begin) * costs.choices();
  plan.adjoint = (tree.state_tokens - tree.adjoint_begin) * costs.adjoint();
  const int64_t fixed = plan.gradients + plan.state + plan.adjoint;

  std::vector<const Node*> nodes;
  gradient_nodes_in_capture_order(*tree.root, nodes);
  std::unordered_set<const Node*> kept_before;
  if (captured_graphs != nullptr) {
    const auto own = std::stable_partition(nodes.begin(), nodes.end(), [](const Node* node) { return node->loss.empty(); });
    std::copy_if(nodes.begin(), own, std::inserter(kept_before, kept_before.end()),
                 [&](const Node* node) { return captured_graphs->contains(node->begin); });
    nodes.erase(nodes.begin(), own);
  }
  const auto with_last_kept = [&](size_t count) {
    MemoryPlan candidate = plan;
    candidate.keep = kept_before;
    candidate.keep.insert(nodes.end() - static_cast<std::ptrdiff_t>(count), nodes.end());
    Walk walk(costs, config, candidate.keep, captured_graphs != nullptr);
    walk.visit(*tree.root);
    candidate.kept_graphs = walk.top_kept();
    candidate.peak = fixed + walk.peak();
    candidate.state += walk.top_moving();
    candidate.working = std::max<int64_t>(0, walk.peak() - walk.top_kept() - walk.top_moving());
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
