#pragma once
// The recurrence of Mamba-2 (state space duality, arXiv 2405.21060) in its chunked form, and its backward pass. Token by
// token, for one head:
//
//   h ← e^{dt_t a} h + dt_t · x_t ⊗ b_t;   y_t = h c_t                                 h [p, n]
//
// Chunked, C tokens at once, with the running decay G = cumsum(dt a) inside the chunk, Γ_ij = e^{G_i − G_j} (i ≥ j) and
// X = dt ∘ x:
//
//   P = tril(c_i·b_j Γ_ij);   Y = e^G ∘ C hᵀ + P X;   h⁺ = e^{G_C} h + (e^{G_C − G} ∘ X)ᵀ B
//
// Without the skip term D x, which is the caller's. Shapes: N sequences of T tokens, H heads of size p, G groups that share
// b and c of size n (the state's); head h reads group h / (H / G), H a multiple of G. lengths[n] of the T tokens are real.
// What the others hold changes neither the end state nor any gradient as long as it is finite; their own out and gradients
// are 0. Computed in float32, in float64 for float64 x. Same bits for the same shapes, device and number of threads.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace longstraw {

struct StateSpaceInput {
  at::Tensor x_NTHp;
  at::Tensor dt_NTH;  // >= 0: after softplus and clamp; wide: float32, float64 beside float64 x
  at::Tensor a_H;     // < 0: -exp(A_log); wide
  at::Tensor b_NTGn;
  at::Tensor c_NTGn;
  at::Tensor state_NHpn;         // wide; undefined: zeros; a first dimension of 1 serves all sequences
  std::vector<int64_t> lengths;  // empty: T each
};

struct StateSpaceOutput {
  at::Tensor out_NTHp;        // dtype of x
  at::Tensor end_state_NHpn;  // wide, after lengths[n] tokens
  at::Tensor chunk_states;    // states at some of the chunks' starts, for the backward pass alone; undefined if not asked for
};

// Of the input's shapes and dtypes. That of the state is summed over the sequences where one state served all, and is
// undefined where the state was.
struct StateSpaceGradients {
  at::Tensor x, dt, a, b, c, state;
};

// Throws ConfigError if shapes, dtypes or lengths don't fit together.
StateSpaceOutput state_space_forward(const StateSpaceInput& input, int64_t chunk = 64, bool for_backward = true);

// `saved` is what state_space_forward gave for the same input and chunk, with for_backward. Either gradient may be undefined:
// zero. Throws ConfigError.
StateSpaceGradients state_space_backward(const StateSpaceInput& input, const StateSpaceOutput& saved, const at::Tensor& grad_out,
                                         const at::Tensor& grad_end_state, int64_t chunk = 64);

}  // namespace longstraw
