#pragma once
// The gated delta rule of Gated DeltaNet (arXiv 2412.06464, equation 10) in its chunked form, and its backward pass.
// Token by token, for one value head, with q and k normalised:
//
//   q̂ = q · rsqrt(Σq² + 1e-6) · dk^-0.5,   k̂ = k · rsqrt(Σk² + 1e-6)
//   S ← e^{g_t} S;   S ← S + k̂_t ⊗ β_t (v_t − Sᵀ k̂_t);   o_t = Sᵀ q̂_t                 S [dk, dv]
//
// Chunked, C tokens at once, with the running decay G = cumsum g inside the chunk, Γ_ij = e^{G_i − G_j} (i ≥ j):
//
//   A = stril(β_i k̂_i·k̂_j Γ_ij),  P = tril(q̂_i·k̂_j Γ_ij)
//   (I + A) U = β ∘ (V − e^G ∘ K̂ S);   O = e^G ∘ Q̂ S + P U;   S⁺ = e^{G_C} S + K̂ᵀ (e^{G_C − G} ∘ U)
//
// Only S goes from chunk to chunk; the backward pass walks the chunks in reverse with the adjoint of S.
//
// Shapes: N sequences of T tokens, K key heads of size d (dk), H value heads of size v (dv); value head h reads key head
// h / (H / K), H a multiple of K. lengths[n] of the T tokens are real. What the others hold changes neither the end state
// nor any gradient as long as it is finite; their own out and gradients are 0.
// Computed in float32, in float64 for float64 values. Same bits for the same shapes, device and number of threads.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace longstraw {

struct DeltaRuleInput {
  at::Tensor query_NTKd;  // as they come from the convolution: neither normalised nor scaled
  at::Tensor key_NTKd;
  at::Tensor value_NTHv;
  at::Tensor log_decay_NTH;      // g <= 0; wide: float32, float64 beside float64 values
  at::Tensor beta_NTH;           // wide
  at::Tensor state_NHkv;         // wide; undefined: zeros; a first dimension of 1 serves all sequences
  std::vector<int64_t> lengths;  // empty: T each
};

struct DeltaRuleOutput {
  at::Tensor out_NTHv;        // dtype of the values
  at::Tensor end_state_NHkv;  // wide, after lengths[n] tokens
  at::Tensor chunk_states;    // states at some of the chunks' starts, for the backward pass alone; undefined if not asked for
};

// Of the input's shapes and dtypes. That of the state is summed over the sequences where one state served all, and is
// undefined where the state was.
struct DeltaRuleGradients {
  at::Tensor query, key, value, log_decay, beta, state;
};

// Throws ConfigError if shapes, dtypes or lengths don't fit together.
DeltaRuleOutput delta_rule_forward(const DeltaRuleInput& input, int64_t chunk = 64, bool for_backward = true);

// `saved` is what delta_rule_forward gave for the same input and chunk, with for_backward. Either gradient may be undefined:
// zero. Throws ConfigError.
DeltaRuleGradients delta_rule_backward(const DeltaRuleInput& input, const DeltaRuleOutput& saved, const at::Tensor& grad_out,
                                       const at::Tensor& grad_end_state, int64_t chunk = 64);

}  // namespace longstraw
