#include "longstraw/causal_convolution.h"

#include "core/base/errors.h"
#include "core/device/device.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <optional>

namespace longstraw {
namespace {

using core::device::accumulation_dtype;

// Tokens × channels of a piece, so that its handful of wide temporaries stay in cache; a GPU takes larger ones.
constexpr int64_t kCpuElements = int64_t{1} << 15;
constexpr int64_t kDeviceElements = int64_t{1} << 24;
constexpr int64_t kChannels = 512;  // of a piece on CPU; pieces of different channels go to different threads

struct Shape {
  int64_t sequences, tokens, channels, taps;
};

void check(const char* name, const at::Tensor& tensor, std::optional<at::ScalarType> dtype, at::IntArrayRef shape) {
  if (tensor.defined() && tensor.sizes() == shape && (!dtype || tensor.scalar_type() == *dtype)) return;
  throw ConfigError(fmt::format("causal convolution: {}: {} [{}], expected {} [{}]", name,
                                tensor.defined() ? toString(tensor.scalar_type()) : "none",
                                tensor.defined() ? fmt::format("{}", fmt::join(tensor.sizes(), ", ")) : "",
                                dtype ? toString(*dtype) : "any type", fmt::join(shape, ", ")));
}

Shape checked_shape(const ConvolutionInput& in) {
  if (!in.x_NTC.defined() || in.x_NTC.dim() != 3) throw ConfigError("causal convolution: x is not [N, T, C]");
  if (!in.weight_C1K.defined() || in.weight_C1K.dim() != 3 || in.weight_C1K.size(2) < 1) {
    throw ConfigError("causal convolution: weight is not [C, 1, K]");
  }
  const Shape s{in.x_NTC.size(0), in.x_NTC.size(1), in.x_NTC.size(2), in.weight_C1K.size(2)};
  check("weight", in.weight_C1K, std::nullopt, {s.channels, 1, s.taps});
  if (in.bias_C.defined()) check("bias", in.bias_C, std::nullopt, {s.channels});
  if (in.window_NCk.defined()) {
    check("window", in.window_NCk, in.x_NTC.scalar_type(), {in.window_NCk.size(0) == 1 ? 1 : s.sequences, s.channels, s.taps - 1});
  }
  if (!in.lengths.empty() && int64_t(in.lengths.size()) != s.sequences) {
    throw ConfigError(fmt::format("causal convolution: {} lengths for {} sequences", in.lengths.size(), s.sequences));
  }
  for (const int64_t length : in.lengths) {
    if (length < 0 || length > s.tokens) {
      throw ConfigError(fmt::format("causal convolution: length {} of a sequence, expected 0 to {}", length, s.tokens));
    }
  }
  return s;
}

// Sequences of the same length that lie beside each other: they are convolved together.
struct Rows {
  int64_t first, count, length;
};

std::vector<Rows> rows_of(const ConvolutionInput& in, const Shape& s) {
  if (in.lengths.empty()) return {{0, s.sequences, s.tokens}};
  std::vector<Rows> all;
  for (int64_t n = 0; n < s.sequences; ++n) {
    if (!all.empty() && all.back().length == in.lengths[size_t(n)]) {
      ++all.back().count;
    } else {
      all.push_back({n, 1, in.lengths[size_t(n)]});
    }
  }
  return all;
}

// One range of channels, with its parameters, wide: taps [K, c], bias [c] or undefined.
struct Channels {
  int64_t first, count;
  at::Tensor taps_Kc, bias_c;
};

Channels channels_at(const ConvolutionInput& in, int64_t first, int64_t count) {
  const auto wide = accumulation_dtype(in.x_NTC.scalar_type());
  Channels c{first, count, in.weight_C1K.narrow(0, first, count).squeeze(1).t().to(wide).contiguous(), {}};
  if (in.bias_C.defined()) c.bias_c = in.bias_C.narrow(0, first, count).to(wide);
  return c;
}

// The K−1 columns before token `begin` and the tokens up to `end`, wide: [n, K−1+tokens, c].
at::Tensor columns(const ConvolutionInput& in, const Shape& s, const Rows& rows, const Channels& c, int64_t begin, int64_t end) {
  const int64_t before = s.taps - 1, from_x = std::min(before, begin), from_window = before - from_x;
  at::Tensor u =
      at::empty({rows.count, before + end - begin, c.count}, in.x_NTC.options().dtype(accumulation_dtype(in.x_NTC.scalar_type())));
  if (from_window > 0) {
    at::Tensor oldest = u.narrow(1, 0, from_window);
    if (in.window_NCk.defined()) {
      const at::Tensor window = in.window_NCk.size(0) == 1 ? in.window_NCk : in.window_NCk.narrow(0, rows.first, rows.count);
      oldest.copy_(window.narrow(1, c.first, c.count).narrow(2, before - from_window, from_window).transpose(1, 2));
    } else {
      oldest.zero_();
    }
  }
  u.narrow(1, from_window, from_x + end - begin)
      .copy_(
          in.x_NTC.narrow(0, rows.first, rows.count).narrow(1, begin - from_x, from_x + end - begin).narrow(2, c.first, c.count));
  return u;
}

// bias + Σ_j w_j ∘ u_{t+j}, before the silu: [n, tokens, c].
at::Tensor convolve(const at::Tensor& u, const Channels& c) {
  const int64_t taps = c.taps_Kc.size(0), tokens = u.size(1) - taps + 1;
  at::Tensor sum = u.narrow(1, 0, tokens) * c.taps_Kc[0];
  for (int64_t j = 1; j < taps; ++j) sum.addcmul_(u.narrow(1, j, tokens), c.taps_Kc[j]);
  if (c.bias_c.defined()) sum.add_(c.bias_c);
  return sum;
}

int64_t piece_tokens(const ConvolutionInput& in, const Rows& rows, const Channels& c) {
  const int64_t budget = in.x_NTC.is_cpu() ? kCpuElements : kDeviceElements;
  return std::max<int64_t>(1, budget / std::max<int64_t>(1, rows.count * c.count));
}

void for_channels(const ConvolutionInput& in, const Shape& s, const std::function<void(const Channels&)>& work) {
  const int64_t width = in.x_NTC.is_cpu() ? kChannels : std::max<int64_t>(1, s.channels), ranges = (s.channels + width - 1) / width;
  const auto run = [&](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;  // a thread of the pool does not know the caller's
    for (int64_t i = begin; i < end; ++i) work(channels_at(in, i * width, std::min(width, s.channels - i * width)));
  };
  if (in.x_NTC.is_cpu() && ranges > 1 && ranges >= at::get_num_threads()) {
    at::parallel_for(0, ranges, /*grain_size=*/1, run);
  } else {
    run(0, ranges);
  }
}

at::Tensor part(const at::Tensor& x_NTC, const Rows& rows, const Channels& c, int64_t begin, int64_t end) {
  return x_NTC.narrow(0, rows.first, rows.count).narrow(1, begin, end - begin).narrow(2, c.first, c.count);
}

void zero_padding(const at::Tensor& x_NTC, const std::vector<Rows>& all) {
  for (const Rows& rows : all) x_NTC.narrow(0, rows.first, rows.count).slice(1, rows.length).zero_();
}

// From the last piece to the first. `carry` is the gradient of the K−1 columns that end where the piece ends: what later
// tokens, or the end window, took from them.
void backward_rows(const ConvolutionInput& in, const Shape& s, const Rows& rows, const Channels& c, const at::Tensor& grad_out,
                   const at::Tensor& grad_end_window, const ConvolutionGradients& into, const at::Tensor& window_grad) {
  const int64_t before = s.taps - 1, most = piece_tokens(in, rows, c);
  const auto wide = window_grad.options();
  at::Tensor carry = at::zeros({rows.count, before, c.count}, wide);
  if (grad_end_window.defined()) {
    carry.copy_(grad_end_window.narrow(0, rows.first, rows.count).narrow(1, c.first, c.count).transpose(1, 2));
  }
  at::Tensor weight_grad = into.weight.narrow(0, c.first, c.count).squeeze(1).t();  // [K, c]
  for (int64_t end = rows.length; end > 0;) {
    const int64_t begin = std::max<int64_t>(0, end - most), tokens = end - begin;
    at::Tensor du = at::zeros({rows.count, before + tokens, c.count}, wide);
    du.narrow(1, tokens, before).copy_(carry);
    if (grad_out.defined()) {
      const at::Tensor u = columns(in, s, rows, c, begin, end);
      const at::Tensor grad = part(grad_out, rows, c, begin, end).to(u.scalar_type());
      const at::Tensor dz = at::silu_backward(grad, convolve(u, c));
      for (int64_t j = 0; j < s.taps; ++j) {
        du.narrow(1, j, tokens).addcmul_(dz, c.taps_Kc[j]);
        weight_grad[j].add_((dz * u.narrow(1, j, tokens)).sum(at::IntArrayRef{0, 1}));
      }
      if (into.bias.defined()) into.bias.narrow(0, c.first, c.count).add_(dz.sum(at::IntArrayRef{0, 1}));
    }
    part(into.x, rows, c, begin, end).copy_(du.narrow(1, before, tokens));
    carry = du.narrow(1, 0, before).clone();
    end = begin;
  }
  window_grad.narrow(0, rows.first, rows.count).narrow(1, c.first, c.count).copy_(carry.transpose(1, 2));
}

}  // namespace

ConvolutionOutput causal_convolution_forward(const ConvolutionInput& input) {
  const at::NoGradGuard no_grad;
  const Shape s = checked_shape(input);
  const std::vector<Rows> all = rows_of(input, s);
  const int64_t before = s.taps - 1;
  ConvolutionOutput out{at::empty(input.x_NTC.sizes(), input.x_NTC.options()),
                        at::empty({s.sequences, s.channels, before}, input.x_NTC.options())};
  for_channels(input, s, [&](const Channels& c) {
    for (const Rows& rows : all) {
      const int64_t most = piece_tokens(input, rows, c);
      for (int64_t begin = 0; begin < rows.length; begin += most) {
        const int64_t end = std::min(rows.length, begin + most);
        at::Tensor sum = convolve(columns(input, s, rows, c, begin, end), c);
        part(out.out_NTC, rows, c, begin, end).copy_(at::silu_(sum));
      }
      const at::Tensor last = columns(input, s, rows, c, rows.length, rows.length);
      out.end_window_NCk.narrow(0, rows.first, rows.count).narrow(1, c.first, c.count).copy_(last.transpose(1, 2));
    }
  });
  zero_padding(out.out_NTC, all);
  return out;
}

ConvolutionGradients causal_convolution_backward(const ConvolutionInput& input, const at::Tensor& grad_out,
                                                 const at::Tensor& grad_end_window) {
  const at::NoGradGuard no_grad;
  const Shape s = checked_shape(input);
  const std::vector<Rows> all = rows_of(input, s);
  const auto narrow = input.x_NTC.scalar_type();
  const std::vector<int64_t> window_shape{s.sequences, s.channels, s.taps - 1};
  if (grad_out.defined()) check("grad_out", grad_out, narrow, input.x_NTC.sizes());
  if (grad_end_window.defined()) check("grad_end_window", grad_end_window, std::nullopt, window_shape);
  const auto wide = input.x_NTC.options().dtype(accumulation_dtype(narrow));
  ConvolutionGradients into{
      at::empty(input.x_NTC.sizes(), input.x_NTC.options()), {}, at::zeros(input.weight_C1K.sizes(), wide), {}};
  if (input.bias_C.defined()) into.bias = at::zeros(input.bias_C.sizes(), wide);
  const at::Tensor window_grad = at::empty(window_shape, wide);
  for_channels(input, s, [&](const Channels& c) {
    for (const Rows& rows : all) backward_rows(input, s, rows, c, grad_out, grad_end_window, into, window_grad);
  });
  zero_padding(into.x, all);
  if (input.window_NCk.defined()) {
    into.window = input.window_NCk.size(0) == s.sequences ? window_grad : window_grad.sum(0, /*keepdim=*/true);
  }
  return into;
}

}  // namespace longstraw
