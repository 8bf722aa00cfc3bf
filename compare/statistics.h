#pragma once
// How far a candidate's gradient is from a reference's: sums that are streamed in double and merge in any grouping
// (parameter, layer, kind, whole model). With reference b and candidate a, over the elements that are finite on both sides:
//
//   cosine         <a, b> / (|a| |b|)
//   relative_l2    |a - b| / |b|
//   norm_ratio     |a| / |b|
//   sign_agreement share of elements with the same sign (zero is a sign of its own)
//   update_cosine  cosine of u(a) and u(b), u(g) = g / (|g| + 1e-8): AdamW's first update
//   error_quantile of |a - b| (histogram.h); max_error exact, with its place
//
// Zero against zero: relative_l2 0, cosines 1, norm_ratio 1. Zero reference, non-zero candidate: relative_l2 and norm_ratio
// infinite, cosines 0. A non-finite element that the other side does not have in the same form (NaN, +inf, -inf) makes
// relative_l2 infinite and the cosines NaN; one that both have is left out of the sums and counted.
// Results do not depend on the size of the blocks beyond the rounding of sums of blocks in long double.

#include <cstdint>
#include <string>

#include "compare/histogram.h"

namespace longstraw::compare {

inline constexpr double kAdamEpsilon = 1e-8;

struct PairStatistics {
  std::int64_t elements = 0;
  std::int64_t same_sign = 0;
  std::int64_t reference_nonzero = 0;
  std::int64_t candidate_nonzero = 0;
  std::int64_t reference_nonfinite = 0;
  std::int64_t candidate_nonfinite = 0;
  std::int64_t unmatched_nonfinite = 0;  // elements where one side has a non-finite value and the other not the same one
  std::int64_t first_unmatched = -1;     // index of the first of them in its parameter

  long double dot = 0;
  long double reference_squares = 0;
  long double candidate_squares = 0;
  long double difference_squares = 0;
  long double update_dot = 0;
  long double update_reference_squares = 0;
  long double update_candidate_squares = 0;

  double max_error = 0;
  std::int64_t max_error_index = -1;  // in its parameter
  std::string max_error_parameter;    // filled in by the owner of the names
  LogHistogram errors;
  bool estimated = false;  // from sketches: norms are exact, dot and difference estimates, the rest unknown

  void merge(const PairStatistics& other);

  double reference_norm() const;
  double candidate_norm() const;
  double difference_norm() const;
  double cosine() const;
  double relative_l2() const;
  double norm_ratio() const;
  double sign_agreement() const;  // NaN when estimated
  double update_cosine() const;   // NaN when estimated
  double error_quantile(double q) const;
  // What is left of the candidate when the best multiple of the reference is taken away: sqrt(1 - cosine^2).
  double residual() const;
};

// Adds `count` elements; `offset` is the index of the first in its parameter.
void accumulate(PairStatistics& statistics, std::int64_t offset, const double* reference, const double* candidate,
                std::int64_t count);

}  // namespace longstraw::compare
