#pragma once
// A batch as a tree of token segments: prompts with a common beginning share its nodes, responses are leaves.
//
// A prompt x_0 … x_{P-1} leaves the state of x_0 … x_{P-2}; the last prompt token belongs to every response, because its
// logits predict the first response token. So the branch of a response y_1 … y_R runs x_{P-1}, y_1 … y_{R-1} at positions
// P-1 … P+R-2 and predicts y_1 … y_R. A branch longer than a segment is a path of segments too.
//
// The cut c of a prompt is the first position whose state carries a gradient: 0 under exact, P-1 under detached,
// max(0, P-1-W) under tail (the last W tokens of the prompt state). A node's tokens lie on one side of the cut.

#include "longstraw/config.h"

#include "core/data/rollouts.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace longstraw {

// Tokens that predict a run of one response's tokens: token j of the branch predicts completion_ids[first_target + j].
struct Branch {
  int64_t prompt = 0;  // index into the batch
  int64_t member = 0;  // index into the prompt's responses
  int64_t first_target = 0;
  int64_t adjoint_from = 0;  // the prompt's cut
  std::vector<int64_t> tokens;
  std::vector<int64_t> targets;  // as many as tokens
};

struct Node {
  int64_t begin = 0;              // position of the first token
  std::vector<int64_t> tokens;    // state that children and branches read; empty at the root
  int64_t adjoint_from = 0;       // the smallest cut of the prompts below; all agree if it carries a gradient
  bool carries_gradient = false;  // begin >= adjoint_from
  std::vector<Branch> loss;       // at most one: the targets these very tokens predict (a long response's segment)
  std::vector<Branch> branches;   // short enough to run in one piece after this node
  std::vector<std::unique_ptr<Node>> children;

  int64_t end() const { return begin + static_cast<int64_t>(tokens.size()); }
};

struct TokenTree {
  std::unique_ptr<Node> root;
  int64_t state_tokens = 0;   // longest path of nodes: positions the prompt state needs room for
  int64_t adjoint_begin = 0;  // smallest cut; state_tokens if no node carries a gradient
  int64_t node_tokens = 0;    // tokens over all nodes: what capture runs
  int64_t branch_tokens = 0;
  int64_t nodes = 0;
};

TokenTree build_token_tree(const core::data::Batch& batch, const LongstrawConfig& config);
// Of these prompts of `batch` alone.
TokenTree build_token_tree(const core::data::Batch& batch, const std::vector<int64_t>& prompts, const LongstrawConfig& config);

// First position with a gradient for a prompt of `prompt_tokens` tokens.
int64_t gradient_cut(int64_t prompt_tokens, const LongstrawConfig& config);

}  // namespace longstraw
