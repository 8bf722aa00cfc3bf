#pragma once
// Attention of tokens run together over what came before all of them (the past, in a prompt state) and over
// themselves. The tokens are spans: each span is one causal chain that sees the past and itself, never another span,
// so several responses can be replayed at once.

#include "longstraw/prompt_state.h"

#include "core/model/execution.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace longstraw {

// Rows [begin, end) of the tokens run together; row r stands at position past_tokens + (r - begin).
struct Span {
  int64_t begin = 0;
  int64_t end = 0;
};

struct Past {
  PromptState* state = nullptr;
  int64_t tokens = 0;        // positions 0 … tokens-1 of the state are visible
  int64_t adjoint_from = 0;  // of these, positions >= adjoint_from want their adjoint added to; none if >= tokens
  // Whether the carried values that these tokens left want an adjoint.
  bool carries_gradient() const { return tokens > adjoint_from; }
};

// Keys of the past attended over in one call: bounds the key and value gradients that exist before they are added to
// the adjoint.
inline constexpr int64_t kPastBlock = 16384;

// Queries of a windowed layer attended in one call, so that a call's keys are not many times what a query sees.
inline constexpr int64_t kWindowTile = 256;

// query [S, H, d], key [S, G, d], value [S, G, v] -> [S, H, v]. The slot's first rows are the keys, its second the values; of
// a slot with one kind of rows, the values are the first v columns of the keys. The gradient of query, key and value goes through
// autograd; that of the past is added to the state's adjoint when the backward pass runs, and is not computed for positions that
// want none. The past must hold the same bits at the backward pass as at the forward pass.
at::Tensor prefix_attention(const core::model::AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                            const at::Tensor& value_SGd, const std::vector<Span>& spans, const Past& past);

}  // namespace longstraw
