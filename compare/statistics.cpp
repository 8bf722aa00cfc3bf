#include "compare/statistics.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

namespace longstraw::compare {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kChunk = 2048;  // a chunk's operands and its difference stay in the first-level cache

using Values = Eigen::Map<const Eigen::ArrayXd>;

double root(long double squares) { return static_cast<double>(std::sqrt(squares)); }

double cosine_of(long double dot, long double a_squares, long double b_squares, const PairStatistics& s) {
  if (s.unmatched_nonfinite > 0) return kUnknown;
  if (a_squares == 0 && b_squares == 0) return 1;
  if (a_squares == 0 || b_squares == 0) return 0;
  return static_cast<double>(std::clamp(dot / (std::sqrt(a_squares) * std::sqrt(b_squares)), -1.0L, 1.0L));
}

bool same_form(double a, double b) { return (std::isnan(a) && std::isnan(b)) || a == b; }

int sign_of(double x) { return (x > 0) - (x < 0); }

void add_element(PairStatistics& s, std::int64_t index, double b, double a) {
  const bool a_finite = std::isfinite(a), b_finite = std::isfinite(b);
  s.reference_nonzero += b != 0;
  s.candidate_nonzero += a != 0;
  if (!a_finite || !b_finite) {
    s.reference_nonfinite += !b_finite;
    s.candidate_nonfinite += !a_finite;
    if (same_form(a, b)) {
      ++s.same_sign;
      return;
    }
    if (s.unmatched_nonfinite++ == 0) s.first_unmatched = index;
    return;
  }
  s.same_sign += sign_of(a) == sign_of(b);
  // long double: squares of the smallest and the largest doubles neither vanish nor overflow.
  const long double wide_a = a, wide_b = b, difference = wide_a - wide_b;
  s.dot += wide_a * wide_b;
  s.reference_squares += wide_b * wide_b;
  s.candidate_squares += wide_a * wide_a;
  s.difference_squares += difference * difference;
  const double update_a = a / (std::abs(a) + kAdamEpsilon), update_b = b / (std::abs(b) + kAdamEpsilon);
  s.update_dot += static_cast<long double>(update_a) * update_b;
  s.update_reference_squares += static_cast<long double>(update_b) * update_b;
  s.update_candidate_squares += static_cast<long double>(update_a) * update_a;
  const double error = std::min(static_cast<double>(std::abs(difference)), std::numeric_limits<double>::max());
  s.errors.add(error);
  if (error > s.max_error || s.max_error_index < 0) {
    s.max_error = error;
    s.max_error_index = index;
  }
}

// Whether sums of squares in double are safe: nothing non-finite, nothing whose square would overflow, and no chunk so
// small that its squares would vanish.
bool plain(const Values& a, const Values& b) {
  const double largest_a = a.abs().maxCoeff<Eigen::PropagateNaN>(), largest_b = b.abs().maxCoeff<Eigen::PropagateNaN>();
  // A sum, unlike std::max, is NaN when either is.
  const double either = largest_a + largest_b;
  return either == 0 || (either > 1e-120 && either < 1e140);
}

void add_plain(PairStatistics& s, std::int64_t offset, const Values& b, const Values& a) {
  Eigen::Array<double, Eigen::Dynamic, 1, 0, kChunk, 1> error = (a - b).abs();
  s.dot += (a * b).sum();
  s.reference_squares += b.square().sum();
  s.candidate_squares += a.square().sum();
  s.difference_squares += error.square().sum();
  const Eigen::Array<double, Eigen::Dynamic, 1, 0, kChunk, 1> update_a = a / (a.abs() + kAdamEpsilon);
  const Eigen::Array<double, Eigen::Dynamic, 1, 0, kChunk, 1> update_b = b / (b.abs() + kAdamEpsilon);
  s.update_dot += (update_a * update_b).sum();
  s.update_reference_squares += update_b.square().sum();
  s.update_candidate_squares += update_a.square().sum();
  std::int64_t same = 0, a_nonzero = 0, b_nonzero = 0;
  for (Eigen::Index i = 0; i < a.size(); ++i) {
    same += static_cast<int>((a[i] > 0) == (b[i] > 0)) & static_cast<int>((a[i] < 0) == (b[i] < 0));
    a_nonzero += a[i] != 0;
    b_nonzero += b[i] != 0;
  }
  s.same_sign += same;
  s.candidate_nonzero += a_nonzero;
  s.reference_nonzero += b_nonzero;
  const double largest = error.maxCoeff();
  if (largest > s.max_error || s.max_error_index < 0) {
    const auto at = std::find(error.data(), error.data() + error.size(), largest);
    s.max_error = largest;
    s.max_error_index = offset + (at - error.data());
  }
  s.errors.add(error.data(), static_cast<std::size_t>(error.size()));
}

}  // namespace

void accumulate(PairStatistics& s, std::int64_t offset, const double* reference, const double* candidate, std::int64_t count) {
  s.elements += count;
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t n = std::min(kChunk, count - begin);
    const Values b(reference + begin, n), a(candidate + begin, n);
    if (plain(a, b)) {
      add_plain(s, offset + begin, b, a);
    } else {
      for (std::int64_t i = 0; i < n; ++i) add_element(s, offset + begin + i, b[i], a[i]);
    }
  }
}

void PairStatistics::merge(const PairStatistics& o) {
  elements += o.elements;
  same_sign += o.same_sign;
  reference_nonzero += o.reference_nonzero;
  candidate_nonzero += o.candidate_nonzero;
  reference_nonfinite += o.reference_nonfinite;
  candidate_nonfinite += o.candidate_nonfinite;
  if (unmatched_nonfinite == 0) first_unmatched = o.first_unmatched;
  unmatched_nonfinite += o.unmatched_nonfinite;
  dot += o.dot;
  reference_squares += o.reference_squares;
  candidate_squares += o.candidate_squares;
  difference_squares += o.difference_squares;
  update_dot += o.update_dot;
  update_reference_squares += o.update_reference_squares;
  update_candidate_squares += o.update_candidate_squares;
  if (o.max_error_index >= 0 && (o.max_error > max_error || max_error_index < 0)) {
    max_error = o.max_error;
    max_error_index = o.max_error_index;
    max_error_parameter = o.max_error_parameter;
  }
  errors.merge(o.errors);
  estimated = estimated || o.estimated;
}

double PairStatistics::reference_norm() const { return root(reference_squares); }
double PairStatistics::candidate_norm() const { return root(candidate_squares); }
double PairStatistics::difference_norm() const { return root(difference_squares); }
double PairStatistics::cosine() const { return cosine_of(dot, candidate_squares, reference_squares, *this); }

double PairStatistics::relative_l2() const {
  if (unmatched_nonfinite > 0) return kInfinity;
  if (difference_squares == 0) return 0;
  return reference_squares == 0 ? kInfinity : static_cast<double>(std::sqrt(difference_squares / reference_squares));
}

double PairStatistics::norm_ratio() const {
  if (candidate_squares == 0 && reference_squares == 0) return 1;
  return reference_squares == 0 ? kInfinity : static_cast<double>(std::sqrt(candidate_squares / reference_squares));
}

double PairStatistics::sign_agreement() const {
  if (estimated) return kUnknown;
  return elements == 0 ? 1 : static_cast<double>(same_sign) / static_cast<double>(elements);
}

double PairStatistics::update_cosine() const {
  return estimated ? kUnknown : cosine_of(update_dot, update_candidate_squares, update_reference_squares, *this);
}

double PairStatistics::error_quantile(double q) const {
  if (estimated) return kUnknown;
  if (unmatched_nonfinite > 0 && q >= 1) return kInfinity;
  return q >= 1 ? max_error : std::min(errors.quantile(q), max_error);
}

double PairStatistics::residual() const {
  const double c = cosine();
  return std::sqrt(std::max(0.0, (1 - c) * (1 + c)));
}

}  // namespace longstraw::compare
