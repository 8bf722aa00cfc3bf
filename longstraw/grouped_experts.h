#pragma once
// The routed part of a mixture of experts, and its backward pass:
//
//   out_t = Σ_j weight_{t,j} · expert_{chosen[t, j]}(x_t),   expert(x) = down (act(gate x) ∘ up x)   or   down act(up x)
//
// (token, choice) pairs are sorted by expert, stably, so that each expert's rows lie together: one matrix product per
// projection and expert, none for an expert without tokens. Each token's sum runs over its experts in rising order and in
// wide dtype: the same inputs give the same bits.
//
// Backward, with g = grad_out, u the expert's inner activation:  e = downᵀ g;  dweight = e · u;  ddown += g (weight u)ᵀ;
// du = weight · e, through the activation to gate and up. e · u stands for g · expert(x): no expert's output is kept.
//
// Kept for the backward pass beside x: the order, and either the products gate x and up x (expert_product_bytes) or
// nothing, when the backward pass multiplies again: 8 matrix products instead of 6, and the same bits.
//
// Shapes: S tokens, D hidden size, E experts, k chosen, I inner size. Wide is float32, float64 in a float64 run.

#include "core/model/execution.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace longstraw {

struct ExpertOrder {
  at::Tensor slot_N;            // int64, N = S · k: the pair t · k + j at each place of the sorted order
  std::vector<int64_t> counts;  // of each expert
};

// What the backward pass needs. Tensors are detached.
struct ExpertsSaved {
  at::Tensor x_SD, weights_Sk;
  ExpertOrder order;
  at::Tensor gate_NI, up_NI;  // products in sorted order; undefined: multiplied again
};

struct ExpertsForward {
  at::Tensor out_SD;  // dtype of x
  ExpertsSaved saved;
};

struct ExpertsGradients {
  at::Tensor x_SD;        // dtype of x
  at::Tensor weights_Sk;  // dtype of the weights
};

// The accumulator of a parameter's gradient, in the parameter's shape, wide; undefined: none wanted.
using GradientOf = std::function<at::Tensor(const core::model::Parameter&)>;

// x [S, D]; chosen int64 [S, k], distinct in a row; weights [S, k], dtype of x or wide. Throws ConfigError if shapes don't
// fit together or an expert is out of range.
ExpertsForward grouped_experts_forward(const at::Tensor& x_SD, const at::Tensor& chosen_Sk, const at::Tensor& weights_Sk,
                                       const core::model::ExpertWeights& experts, bool keep_products);

// Adds the gradients of the experts' weights in place into what `gradient_of` gives.
ExpertsGradients grouped_experts_backward(const at::Tensor& grad_SD, const ExpertsSaved& saved,
                                          const core::model::ExpertWeights& experts, const GradientOf& gradient_of);

// Bytes of the products that keep_products keeps, for S · k = pairs.
int64_t expert_product_bytes(int64_t pairs, int64_t inner, bool gated, c10::ScalarType dtype);

}  // namespace longstraw
