#include "longstraw/token_tree.h"

#include "tests/support/fixture.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <functional>
#include <map>

namespace longstraw {
namespace {

using core::data::Batch;

Batch batch_of(const std::vector<std::vector<int64_t>>& prompts, const std::vector<std::vector<int64_t>>& responses) {
  Batch batch;
  for (size_t p = 0; p < prompts.size(); ++p) {
    auto& group = batch.emplace_back();
    group.prompt_id = std::to_string(p);
    group.prompt_ids = prompts[p];
    for (const auto& ids : responses) group.responses.push_back({.completion_ids = ids, .reward = 1.0});
  }
  return batch;
}

// What each response's path through the tree spells: tokens by position, and targets by index.
struct Spelled {
  std::vector<int64_t> tokens, targets;
};
std::map<std::pair<int64_t, int64_t>, Spelled> spell(const TokenTree& tree) {
  std::map<std::pair<int64_t, int64_t>, Spelled> spelled;
  std::function<void(const Node&, std::vector<int64_t>, std::vector<int64_t>)> walk =
      [&](const Node& node, std::vector<int64_t> path, std::vector<int64_t> targets) {
        EXPECT_EQ(node.begin, int64_t(path.size()));
        path.insert(path.end(), node.tokens.begin(), node.tokens.end());
        for (const Branch& part : node.loss) targets.insert(targets.end(), part.targets.begin(), part.targets.end());
        for (const Branch& branch : node.branches) {
          EXPECT_EQ(branch.first_target, int64_t(targets.size()));
          auto& s = spelled[{branch.prompt, branch.member}];
          EXPECT_TRUE(s.tokens.empty()) << "a response twice";
          s = {path, targets};
          s.tokens.insert(s.tokens.end(), branch.tokens.begin(), branch.tokens.end());
          s.targets.insert(s.targets.end(), branch.targets.begin(), branch.targets.end());
        }
        for (const auto& child : node.children) walk(*child, path, targets);
      };
  walk(*tree.root, {}, {});
  return spelled;
}

RC_GTEST_PROP(TokenTree, EveryResponseIsSpelledOnceBehindItsPrompt, ()) {
  Batch batch;
  const auto small = rc::gen::inRange<int64_t>(0, 3);  // few tokens: prompts share beginnings often
  const auto prompts = *rc::gen::inRange(1, 5);
  for (int p = 0; p < prompts; ++p) {
    auto& group = batch.emplace_back();
    group.prompt_id = std::to_string(p);
    group.prompt_ids = *rc::gen::nonEmpty(rc::gen::container<std::vector<int64_t>>(small));
    const auto members = *rc::gen::inRange(1, 4);
    for (int m = 0; m < members; ++m) {
      group.responses.push_back({.completion_ids = *rc::gen::nonEmpty(rc::gen::container<std::vector<int64_t>>(small))});
    }
  }
  LongstrawConfig config;
  config.segment_tokens = *rc::gen::inRange(1, 12);
  config.prompt_gradient = *rc::gen::element(PromptGradient::kDetached, PromptGradient::kTail, PromptGradient::kExact);
  config.tail_tokens = *rc::gen::inRange(0, 10);
  const TokenTree tree = build_token_tree(batch, config);
  const auto spelled = spell(tree);
  int64_t responses = 0, longest = 0;
  for (size_t p = 0; p < batch.size(); ++p) {
    for (size_t m = 0; m < batch[p].responses.size(); ++m, ++responses) {
      auto wanted = batch[p].prompt_ids;
      const auto& ids = batch[p].responses[m].completion_ids;
      wanted.insert(wanted.end(), ids.begin(), ids.end() - 1);
      const auto found = spelled.find({int64_t(p), int64_t(m)});
      RC_ASSERT(found != spelled.end());
      RC_ASSERT(found->second.tokens == wanted);
      RC_ASSERT(found->second.targets == ids);
      longest = std::max(longest, int64_t(wanted.size()));
    }
  }
  RC_ASSERT(int64_t(spelled.size()) == responses);
  RC_ASSERT(tree.state_tokens < longest);

  // Segments are no longer than asked, lie on one side of the cut, and gradients never stop above a node they left.
  std::function<void(const Node&, bool)> walk = [&](const Node& node, bool parent_carries) {
    RC_ASSERT(int64_t(node.tokens.size()) <= config.segment_tokens);
    RC_ASSERT(node.carries_gradient || !parent_carries);
    if (!node.tokens.empty()) RC_ASSERT(node.carries_gradient == (node.begin >= node.adjoint_from));
    if (!node.carries_gradient && !node.tokens.empty()) RC_ASSERT(node.end() <= node.adjoint_from);
    for (const auto& child : node.children) walk(*child, node.carries_gradient);
  };
  walk(*tree.root, false);
}

TEST(TokenTree, PromptsShareTheirCommonBeginning) {
  const Batch batch = batch_of({{1, 2, 3, 4, 5}, {1, 2, 3, 9, 9}, {1, 2, 3, 4, 5}}, {{7}});
  const TokenTree tree = build_token_tree(batch, {.segment_tokens = 100});
  // [1 2 3] then [4] for the first and third, [9] for the second: the last prompt token belongs to the branches.
  EXPECT_EQ(tree.node_tokens, 5);
  EXPECT_EQ(tree.nodes, 3);
  EXPECT_EQ(tree.root->children.size(), 1u);
  EXPECT_EQ(tree.branch_tokens, 3);
}

TEST(TokenTree, UnderTailPromptsShareOnlyWhatCarriesNoGradientOrEquallyMuch) {
  // Cuts at 2 (P = 5) and 4 (P = 7) with W = 2: positions 2 and 3 carry the first prompt's gradient only.
  const Batch batch = batch_of({{1, 2, 3, 4, 5}, {1, 2, 3, 4, 5, 6, 7}}, {{8}});
  const TokenTree tree =
      build_token_tree(batch, {.prompt_gradient = PromptGradient::kTail, .tail_tokens = 2, .segment_tokens = 100});
  EXPECT_EQ(tree.node_tokens, 2 + 2 + 4);
}

TEST(TokenTree, TheLastPromptTokenIsNeverState) {
  const TokenTree tree = build_token_tree(batch_of({{4}}, {{5, 6}}), {.segment_tokens = 100});
  EXPECT_EQ(tree.nodes, 0);
  EXPECT_EQ(tree.state_tokens, 0);
  ASSERT_EQ(tree.root->branches.size(), 1u);
  EXPECT_EQ(tree.root->branches[0].tokens, (std::vector<int64_t>{4, 5}));
}

TEST(TokenTree, ALongResponseIsAPathOfSegments) {
  const TokenTree tree =
      build_token_tree(batch_of({{1, 2}}, {{3, 4, 5, 6, 7}}), {.prompt_gradient = PromptGradient::kDetached, .segment_tokens = 2});
  // State [1]; branch [2 3 4 5 6] in pieces of 2: two nodes with a loss and a last branch of one token.
  EXPECT_EQ(tree.nodes, 3);
  EXPECT_EQ(tree.state_tokens, 5);
  EXPECT_EQ(tree.adjoint_begin, 1);  // the prompt's state carries none under detached, the response's own does
}

}  // namespace
}  // namespace longstraw
