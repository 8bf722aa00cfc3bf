#pragma once
// Softmax attention of a set of queries over one block of keys, as a partial result that can be merged with the
// results over other blocks, and its backward pass given the *merged* output and log-sum-exp:
//
//   s = scale · q kᵀ,  lse = log Σ_j e^{s_j},  out = Σ_j e^{s_j − lse} v_j
//   merged over blocks b:  lse = log Σ_b e^{lse_b},  out = Σ_b e^{lse_b − lse} out_b
//   backward: p = e^{s − lse}, dv = pᵀ g, dp = g vᵀ, ds = p ∘ (dp − rowsum(g ∘ out)), dq = scale · ds k, dk = scale · dsᵀ q
//
// (FlashAttention, arXiv 2205.14135 and 2307.08691, whose backward needs no more than lse and out.)
// H query heads, G key/value heads, query head h reads key head h / (H / G); T queries, N keys, d head size (that of the
// values may be another).
// The log-sum-exp is float32, float64 for float64 input.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace longstraw {

// Which keys of the block a query sees. Positions are absolute: query t stands at first_query + t, key n at
// first_key + n. A key is visible if it is not after the query (unless `all`) and, with a window, less than `window`
// before it.
struct BlockMask {
  bool all = true;  // every key of the block comes before every query
  int64_t first_query = 0;
  int64_t first_key = 0;
  std::optional<int64_t> window = std::nullopt;
};

struct PartialAttention {
  at::Tensor out_HTd;
  at::Tensor lse_HT;  // -inf for a query that sees no key of the block; its out row is 0 then
};

struct BlockGradients {
  at::Tensor query_HTd;
  at::Tensor key_GNd;  // undefined when not asked for
  at::Tensor value_GNd;
};

PartialAttention attend_block(const at::Tensor& query_HTd, const at::Tensor& key_GNd, const at::Tensor& value_GNd, double scale,
                              const BlockMask& mask);

// `into` becomes the attention over both blocks, its output in the dtype of the log-sum-exp. An undefined `into`
// becomes `other`.
void merge_partial(PartialAttention& into, const PartialAttention& other);

// Bytes of scores and their gradients that a call without LibTorch's kernel holds at once (backward passes for queries
// alone, windows, devices other than CPU), for `rows` = H·T rows against `keys` keys.
int64_t tile_bytes(int64_t rows, int64_t keys, c10::ScalarType dtype);
// Scratch memory of LibTorch's CPU kernel in a backward pass of `queries` queries against `keys` keys, all threads.
int64_t flash_scratch_bytes(int64_t queries, int64_t keys, c10::ScalarType dtype);

BlockGradients attend_block_backward(const at::Tensor& grad_HTd, const at::Tensor& query_HTd, const at::Tensor& key_GNd,
                                     const at::Tensor& value_GNd, const PartialAttention& merged, double scale,
                                     const BlockMask& mask, bool want_key_value);

}  // namespace longstraw
