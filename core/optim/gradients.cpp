#include "core/optim/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace longstraw::core::optim {

namespace {

// Partial sums have this many elements whatever the number of threads, and are added in order: the norm is the same with any.
constexpr std::int64_t kBlock = std::int64_t{1} << 16;

template <class T>
double sum_of_squares(const T* values, std::int64_t count) {
  std::array<double, 8> lanes{};
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      const auto value = static_cast<double>(values[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (; i < count; ++i) {
    const auto value = static_cast<double>(values[i]);
    lanes[0] += value * value;
  }
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

double squared_norm_on_cpu(const at::Tensor& gradient) {
  const at::Tensor flat = gradient.contiguous().view(-1);
  const std::int64_t count = flat.numel();
  std::vector<double> partial(static_cast<size_t>((count + kBlock - 1) / kBlock), 0.0);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, flat.scalar_type(), "global_norm", [&] {
    const scalar_t* values = flat.const_data_ptr<scalar_t>();
    at::parallel_for(0, static_cast<std::int64_t>(partial.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t block = begin; block < end; ++block) {
        partial[block] = sum_of_squares(values + block * kBlock, std::min(kBlock, count - block * kBlock));
      }
    });
  });
  double sum = 0.0;
  for (const double value : partial) sum += value;
  return sum;
}

// In pieces: a whole gradient in float64 would take twice the memory that it has itself.
double squared_norm_on_device(const at::Tensor& gradient) {
  constexpr std::int64_t kPiece = std::int64_t{1} << 24;
  at::Tensor sum = at::zeros({}, gradient.options().dtype(at::kDouble));
  for (const at::Tensor& piece : gradient.reshape(-1).split(kPiece)) sum += piece.to(at::kDouble).square_().sum();
  return sum.item<double>();
}

}  // namespace

double global_norm(const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  double sum = 0.0;
  for (const at::Tensor& gradient : gradients) {
    sum += gradient.is_cpu() ? squared_norm_on_cpu(gradient) : squared_norm_on_device(gradient);
  }
  return std::sqrt(sum);
}

std::optional<NonFinite> first_non_finite(const model::Decoder& decoder, const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor finite = gradients[i].isfinite().reshape(-1);
    if (finite.all().item<bool>()) continue;
    // The first of the smallest: false comes before true.
    const auto index = finite.to(at::kByte).argmin().item<std::int64_t>();
    return NonFinite{decoder.parameters()[i]->name, index, gradients[i].reshape(-1)[index].item<double>()};
  }
  return std::nullopt;
}

}  // namespace longstraw::core::optim
