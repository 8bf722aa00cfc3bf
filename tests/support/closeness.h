#pragma once
// How far two tensors, or two gradients, are apart, and how far apart roundings alone can bring them.

#include "core/model/decoder.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace longstraw::test {

// ‖got - wanted‖ / ‖wanted‖ in float64. 0 when both are 0; infinite when wanted is 0 and got is not, when shapes differ,
// or when either holds a value that is not finite: a bound tested as `error <= bound` then fails.
double relative_l2(const at::Tensor& got, const at::Tensor& wanted);

struct GradientError {
  double whole = 0.0;  // relative L2 over all parameters together
  double worst = 0.0;  // the largest relative L2 of one parameter
  std::string worst_parameter;
};
// Parallel to decoder.parameters(). A parameter whose wanted gradient is below `floor` of the whole's norm is judged by
// the whole alone: relative to its own rounding noise any number can come out (floor 0: judge every one).
GradientError gradient_error(const core::model::Decoder& decoder, const std::vector<at::Tensor>& got,
                             const std::vector<at::Tensor>& wanted, double floor = 0.0);

// Relative L2 that roundings of `dtype` leave on a gradient of `decoder` over sequences of up to `tokens` tokens.
//
// A value that passes through n dependent roundings, each of relative size u (half an epsilon) and independent of the
// others, is off by about u·sqrt(n) (Higham and Mary 2019, "A new approach to probabilistic rounding error analysis").
// The longest chain in a block runs through its dot products and, with n tokens, through
//   attention           D for q/k/v, d for the scores, n for the softmax and n for the values, H·d for the output projection
//   latent attention    D and the latent's (or the queries') size for the norm and for what is made of it, then as above
//   gated delta rule    D, the convolution, dk for the unit length, (dk + 5) a token for the state (read it, subtract, times β,
//                       outer product, decay, add), dk to read it, dv for the norm, H·dv for the output projection
//   Mamba-2             D, the convolution, 3 a token for the state, N to read it, H·P for the norm and for the projection
//   MLP, experts        D and I; or, through the weights of a router, D and E; the sum over the chosen
// with D for the norm before it; of blocks side by side the longest counts. A backward pass is twice as long again; the output
// layer adds D and V. The constant 4 is for the cancellation in the sums (a sum is smaller than its terms).
double rounding_bound(const core::model::Decoder& decoder, int64_t tokens, at::ScalarType dtype);

}  // namespace longstraw::test
