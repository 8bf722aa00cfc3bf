#include "longstraw/token_tree.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

namespace longstraw {
namespace {

class Builder {
 public:
  Builder(const core::data::Batch& batch, const LongstrawConfig& config) : batch_(batch), config_(config) {}

  TokenTree build(const std::vector<int64_t>& prompts) {
    TokenTree tree;
    tree.root = std::make_unique<Node>();
    tree.root->adjoint_from = INT64_MAX;
    extend(*tree.root, prompts);
    tree.adjoint_begin = INT64_MAX;
    summarise(*tree.root, tree);
    tree.adjoint_begin = std::min(tree.adjoint_begin, tree.state_tokens);
    return tree;
  }

 private:
  int64_t state_tokens(int64_t prompt) const { return static_cast<int64_t>(batch_[prompt].prompt_ids.size()) - 1; }
  int64_t cut(int64_t prompt) const { return gradient_cut(state_tokens(prompt) + 1, config_); }

  // Prompts may share the token at `position` if it is the same token and, once gradients flow through it, if they
  // flow equally far back.
  struct Key {
    int64_t token;
    int64_t cut;  // -1 before the cut
    auto operator<=>(const Key&) const = default;
  };
  Key key(int64_t prompt, int64_t position) const {
    const int64_t c = cut(prompt);
    return {batch_[prompt].prompt_ids[position], position < c ? -1 : c};
  }

  // Hangs `prompts`, which agree on all positions before node.end(), below `node`.
  void extend(Node& node, const std::vector<int64_t>& prompts) {
    const int64_t position = node.end();
    std::map<Key, std::vector<int64_t>> by_key;
    std::vector<Key> order;  // of first appearance, so that the order of accumulation follows the batch
    for (const int64_t prompt : prompts) {
      if (state_tokens(prompt) == position) {
        add_responses(node, prompt);
        continue;
      }
      auto& group = by_key[key(prompt, position)];
      if (group.empty()) order.push_back(key(prompt, position));
      group.push_back(prompt);
    }
    for (const Key& k : order) {
      const auto& group = by_key[k];
      node.children.push_back(segment(group, position));
      extend(*node.children.back(), group);
    }
  }

  // One node from `begin` on: as far as the prompts agree, no longer than a segment, not across the cut.
  std::unique_ptr<Node> segment(const std::vector<int64_t>& prompts, int64_t begin) const {
    auto node = std::make_unique<Node>();
    node->begin = begin;
    node->adjoint_from = INT64_MAX;
    for (const int64_t prompt : prompts) node->adjoint_from = std::min(node->adjoint_from, cut(prompt));
    node->carries_gradient = begin >= node->adjoint_from;
    const int64_t limit = begin + config_.segment_tokens;
    const auto agree = [&](int64_t position) {
      return std::all_of(prompts.begin(), prompts.end(), [&](int64_t prompt) {
        return position < state_tokens(prompt) && key(prompt, position) == key(prompts.front(), position);
      });
    };
    const bool before_cut = key(prompts.front(), begin).cut < 0;
    for (int64_t position = begin; position < limit && agree(position); ++position) {
      const Key k = key(prompts.front(), position);
      if ((k.cut < 0) != before_cut) break;
      node->tokens.push_back(k.token);
    }
    return node;
  }

  void add_responses(Node& node, int64_t prompt) const {
    const auto& group = batch_[prompt];
    for (int64_t member = 0; member < static_cast<int64_t>(group.responses.size()); ++member) {
      const auto& ids = group.responses[member].completion_ids;
      Branch branch{prompt, member, 0, cut(prompt), {group.prompt_ids.back()}, ids};
      branch.tokens.insert(branch.tokens.end(), ids.begin(), ids.end() - 1);
      hang(node, std::move(branch));
    }
  }

  // A branch that is longer than a segment becomes a path of nodes that carry a loss.
  void hang(Node& parent, Branch branch) const {
    const auto length = static_cast<int64_t>(branch.tokens.size());
    if (length <= config_.segment_tokens) {
      parent.branches.push_back(std::move(branch));
      return;
    }
    const auto split = [&](std::vector<int64_t>& from) {
      std::vector<int64_t> rest(from.begin() + config_.segment_tokens, from.end());
      from.resize(config_.segment_tokens);
      return rest;
    };
    Branch rest{branch.prompt,       branch.member,        branch.first_target + config_.segment_tokens,
                branch.adjoint_from, split(branch.tokens), split(branch.targets)};
    auto node = std::make_unique<Node>();
    node->begin = parent.end();
    node->tokens = branch.tokens;
    node->adjoint_from = branch.adjoint_from;
    node->carries_gradient = true;
    node->loss.push_back(std::move(branch));
    hang(*node, std::move(rest));
    parent.children.push_back(std::move(node));
  }

  void summarise(Node& node, TokenTree& tree) const {
    tree.nodes += node.tokens.empty() ? 0 : 1;
    tree.node_tokens += static_cast<int64_t>(node.tokens.size());
    tree.state_tokens = std::max(tree.state_tokens, node.end());
    if (node.carries_gradient) tree.adjoint_begin = std::min(tree.adjoint_begin, node.adjoint_from);
    for (const Branch& branch : node.branches) tree.branch_tokens += static_cast<int64_t>(branch.tokens.size());
    for (const auto& child : node.children) summarise(*child, tree);
  }

  const core::data::Batch& batch_;
  const LongstrawConfig& config_;
};

}  // namespace

int64_t gradient_cut(int64_t prompt_tokens, const LongstrawConfig& config) {
  switch (config.prompt_gradient) {
    case PromptGradient::kExact: return 0;
    case PromptGradient::kDetached: return prompt_tokens - 1;
    case PromptGradient::kTail: return std::max<int64_t>(0, prompt_tokens - 1 - config.tail_tokens);
  }
  return 0;
}

TokenTree build_token_tree(const core::data::Batch& batch, const LongstrawConfig& config) {
  std::vector<int64_t> all(batch.size());
  std::iota(all.begin(), all.end(), 0);
  return build_token_tree(batch, all, config);
}

TokenTree build_token_tree(const core::data::Batch& batch, const std::vector<int64_t>& prompts, const LongstrawConfig& config) {
  return Builder(batch, config).build(prompts);
}

}  // namespace longstraw
