#pragma once
// Pieces of the textbook formulas that several of the reference's operations are made of.
//
// S tokens, H query or value heads, G key/value heads or groups, d head size of queries and keys, v of values.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace longstraw::reference {

// The same values, of which rows 0 … cut - 1 are constants to autograd; 0 cuts nothing. rows [S, ...].
at::Tensor cut_before(const at::Tensor& rows, int64_t cut);

// Head h gets what head h / (H / G) of x [S, G, ...] holds -> [S, H, ...].
at::Tensor for_each_head(const at::Tensor& x_SG, int64_t heads);

// The dtype of a softmax or a recurrent state: float64 for float64, else float32.
at::ScalarType wide(at::ScalarType dtype);

// Σ_j softmax_j(scale · q_i · k_j) v_j over the j with visible[i, j]; query, key [H, S, d], value [H, S, v] -> [H, S, v].
// The softmax is taken wide and cast back before the values, as Hugging Face does.
at::Tensor softmax_attention(const at::Tensor& query_HSd, const at::Tensor& key_HSd, const at::Tensor& value_HSv,
                             const at::Tensor& visible_SS, double scale);

// The k largest of each row, of equal ones the lower index: int64 [S, k] in falling order. Without a graph. A stable sort,
// because at::topk leaves open which of equal values it takes.
at::Tensor largest(const at::Tensor& scores_SE, int64_t k);

}  // namespace longstraw::reference
