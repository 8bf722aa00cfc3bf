#include "tests/support/closeness.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <variant>

namespace longstraw::test {

namespace {
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double ratio(double error, double size) {
  if (!std::isfinite(error) || !std::isfinite(size)) return kInfinity;
  if (size == 0.0) return error == 0.0 ? 0.0 : kInfinity;
  return error / size;
}

double length(const at::Tensor& tensor) { return tensor.detach().to(at::kCPU, at::kDouble).norm().item<double>(); }
double distance(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return kInfinity;
  return (a.detach().to(at::kCPU, at::kDouble) - b.detach().to(at::kCPU, at::kDouble)).norm().item<double>();
}

// The longest chain of dependent roundings of a block, as closeness.h counts it.
struct Chain {
  double hidden;
  double tokens;

  double operator()(const core::model::AttentionShape& s) const {
    return hidden + double(s.head_dim) + 2 * tokens + double(s.heads * s.head_dim);
  }
  double operator()(const core::model::LatentAttentionShape& s) const {
    const int64_t rank = std::max(s.latent, s.query_rank.value_or(0));
    return hidden + 2.0 * double(rank) + double(s.plain_dim + s.rotary_dim) + 2 * tokens + double(s.heads * s.value_dim);
  }
  double operator()(const core::model::DeltaRuleShape& s) const {
    return hidden + double(s.kernel + 2 * s.key_dim) + tokens * double(s.key_dim + 5) + double(s.value_dim) +
           double(s.value_heads * s.value_dim);
  }
  double operator()(const core::model::StateSpaceShape& s) const {
    return hidden + double(s.kernel) + 3 * tokens + double(s.state) + 2.0 * double(s.heads * s.head_dim);
  }
  double operator()(const core::model::MlpShape& s) const { return hidden + double(s.width); }
  double operator()(const core::model::ExpertsShape& s) const {
    const double latent = s.latent > 0 ? hidden + double(s.latent) : 0.0;
    return hidden + latent + double(std::max({s.width, s.shared_width, s.experts})) + double(s.chosen);
  }
};
}  // namespace

double relative_l2(const at::Tensor& got, const at::Tensor& wanted) { return ratio(distance(got, wanted), length(wanted)); }

GradientError gradient_error(const core::model::Decoder& decoder, const std::vector<at::Tensor>& got,
                             const std::vector<at::Tensor>& wanted, double floor) {
  GradientError result;
  if (got.size() != decoder.parameters().size() || wanted.size() != got.size())
    return {kInfinity, kInfinity, "(number of parameters)"};
  double error_squares = 0.0, norm_squares = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    error_squares += std::pow(distance(got[i], wanted[i]), 2);
    norm_squares += std::pow(length(wanted[i]), 2);
  }
  result.whole = ratio(std::sqrt(error_squares), std::sqrt(norm_squares));
  for (size_t i = 0; i < got.size(); ++i) {
    const double own = length(wanted[i]);
    if (own < floor * std::sqrt(norm_squares)) continue;
    const double error = ratio(distance(got[i], wanted[i]), own);
    if (!(error <= result.worst)) {
      result.worst = error;
      result.worst_parameter = decoder.parameters()[i]->name;
    }
  }
  return result;
}

double rounding_bound(const core::model::Decoder& decoder, int64_t tokens, at::ScalarType dtype) {
  const auto& a = decoder.architecture();
  const double unit = dtype == at::kDouble     ? std::ldexp(1.0, -53)
                      : dtype == at::kBFloat16 ? std::ldexp(1.0, -9)
                                               : std::ldexp(1.0, -24);
  double layers = 0.0;
  for (const auto& layer : decoder.blocks()) {
    for (const auto& residual : layer.residuals) {
      double longest = 0.0;
      for (const auto& block : residual.blocks) {
        longest = std::max(longest, std::visit(Chain{double(a.hidden), double(tokens)}, block->shape()));
      }
      layers += double(a.hidden) + longest;
    }
  }
  const double chain = 3.0 * (layers + double(a.hidden) + double(a.vocab));
  return 4.0 * unit * std::sqrt(chain);
}

}  // namespace longstraw::test
