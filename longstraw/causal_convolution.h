#pragma once
// The short depthwise convolution in front of a recurrent mixer, with the columns that came before, and its backward pass:
//
//   u = [window | x] along time;   out_t = silu( bias + Σ_{j<K} weight_j ∘ u_{t+j} )
//
// so that out_t sees x_t and the K − 1 columns before it. Shapes: N sequences of T tokens, C channels, K taps; the window is
// [N, C, K−1], oldest column first. lengths[n] of the T tokens are real; the others' out and gradients are 0.
// Sums are taken in float32 (float64 for float64), rounded to the dtype of x once.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace longstraw {

struct ConvolutionInput {
  at::Tensor x_NTC;
  at::Tensor window_NCk;  // k = K−1; dtype of x; undefined: zeros; a first dimension of 1 serves all sequences
  at::Tensor weight_C1K;
  at::Tensor bias_C;             // may be undefined
  std::vector<int64_t> lengths;  // empty: T each
};

struct ConvolutionOutput {
  at::Tensor out_NTC;         // dtype of x
  at::Tensor end_window_NCk;  // the last K−1 columns before the convolution, after lengths[n] tokens; a copy; dtype of x
};

// Of the input's shapes; that of x in its dtype, the others wide (float32, float64 for float64): they are adjoints that go
// on to earlier tokens, or sums over all. That of the window is summed over the sequences where one window served all. Those of
// an undefined window or bias are undefined.
struct ConvolutionGradients {
  at::Tensor x, window, weight, bias;
};

// Both throw ConfigError if shapes or lengths don't fit together.
ConvolutionOutput causal_convolution_forward(const ConvolutionInput& input);
// Either gradient may be undefined: zero. That of the end window may come in any dtype.
ConvolutionGradients causal_convolution_backward(const ConvolutionInput& input, const at::Tensor& grad_out,
                                                 const at::Tensor& grad_end_window);

}  // namespace longstraw
