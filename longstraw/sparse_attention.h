#pragma once
// Softmax attention of each query over its own list of keys, one key head shared by all query heads, and the value of a key
// its first v columns (latent attention in the absorbed form: key = [latent | rotary key], value = latent):
//
//   s_{h,j} = scale · q_h · k_{p_j},   lse_h = log Σ_j e^{s_{h,j}},   out_h = Σ_j e^{s_{h,j} − lse_h} k_{p_j}[0 … v−1]
//   backward: p = e^{s − lse}, ds = p ∘ (g vᵀ − rowsum(g ∘ out)), dq = scale · ds k, dk_{p_j} += scale · dsᵀ q + [pᵀ g | 0]
//
// The selection is a constant: no gradient flows through the choice. As for attend_block, results over disjoint lists may
// be merged by their log-sum-exp and the backward pass be given the merged output.
//
// Shapes: S tokens run together, H query heads, d key size, v value size, N tokens of the past, K listed keys of a query.
// "Wide" is float32, float64 for float64 input. Sums are taken in a fixed order: the same inputs give the same bits.

#include "longstraw/prefix_attention.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace longstraw {

struct SparseInput {
  at::Tensor query_SHd;
  at::Tensor own_key_Sd;    // dtype of the query, as the past
  at::Tensor past_key_Nd;   // undefined: no past; may be a view of a longer buffer
  at::Tensor positions_SK;  // as select_top_keys makes it: distinct, rising, -1 behind the last
  std::vector<Span> spans;
  int64_t value_width = 0;  // v
  double scale = 1.0;
};

struct SparseAttention {
  at::Tensor out_SHv;  // dtype of the query
  at::Tensor lse_SH;   // wide; -inf for a query whose list is empty; its out is 0 then
};

// Where the gradient of the past's keys is added: row 0 of `sum` belongs to position `from`, positions before it want none.
struct PastAdjoint {
  at::Tensor sum_Md;  // wide, M = N − from, may be a view; undefined: no position wants any
  int64_t from = 0;
};

struct SparseGradients {
  at::Tensor query_SHd;   // dtype of the query
  at::Tensor own_key_Sd;  // wide
};

// Both throw ConfigError if shapes, dtypes or spans don't fit together, or if a listed position is not visible to its query.
SparseAttention sparse_attend(const SparseInput& input);
SparseGradients sparse_attend_backward(const SparseInput& input, const SparseAttention& merged, const at::Tensor& grad_SHv,
                                       const PastAdjoint& past_adjoint);

// Bytes that the backward pass holds at once beside inputs and results; the forward pass holds less.
int64_t sparse_attention_bytes(int64_t rows, int64_t heads, int64_t key_size, int64_t listed, c10::ScalarType dtype,
                               c10::DeviceType device);

}  // namespace longstraw
