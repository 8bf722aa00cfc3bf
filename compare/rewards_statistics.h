#pragma once
// The tests behind a verdict on rewards: pure functions of one number a run. Distributions are Boost.Math's.

#include "compare/rewards.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace longstraw::compare {

// The mean of B minus scale times the mean of A minus shift, and its standard error: of the differences when paired, else
// Welch's. `error` 0 means that there is no spread beyond rounding. With n runs a side error is about unit_error/√n and degrees
// unit_degrees·(n - 1). Needs two runs a side (and as many on both when paired).
struct Contrast {
  double estimate = 0.0, error = 0.0, degrees = 0.0;
  double unit_error = 0.0, unit_degrees = 0.0;

  double t() const;  // ±infinity or 0 without spread
};
Contrast contrast_of(std::span<const double> a, std::span<const double> b, bool paired, double scale = 1.0, double shift = 0.0);

// P values of the t test that the contrast is above 0 (below 0: `p_below`; either: `p_either`). Without spread 0 or 1.
double p_above(const Contrast& contrast);
double p_below(const Contrast& contrast);
double p_either(const Contrast& contrast);
Interval t_interval(const Contrast& contrast, double confidence);

// (mean B - mean A) / standard deviation, times the factor that removes the bias of few runs (Hedges 1981, exact form). Paired:
// by the differences' deviation; else by the root of the mean variance. Infinite when only the spread is 0, NaN
// for two pairs (the factor is 0).
double hedges_g(std::span<const double> a, std::span<const double> b, bool paired);

struct RewardDecision {
  bool paired = false;  // as tested: pairs that all differ by the same while runs differ are a coincidence
  double mean_a = 0.0, mean_b = 0.0;
  Interval difference;
  double margin = 0.0;
  double t = 0.0, degrees = 0.0;
  double p_different = 1.0, p_lower = 1.0, p_upper = 1.0;
  double effect_size = 0.0;
  std::vector<std::string> notes;
  RewardVerdict verdict = RewardVerdict::kUndecided;
};

// The verdict on one number a run. Of `policy` margin, absolute_margin and level count. With one run on a side what would need a
// spread is NaN.
RewardDecision decide(std::span<const double> a, std::span<const double> b, bool paired, const RewardPolicy& policy);

// Seeds a side, in all, with which an undecided comparison would be decided with probability 0.8 if the true means and spreads
// are those observed (power of the two t tests, noncentral t). None: decided, one run a side, or more than kMostSeedsAsked.
inline constexpr std::int64_t kMostSeedsAsked = 1000;
std::optional<std::int64_t> seeds_to_decide(std::span<const double> a, std::span<const double> b, const RewardDecision& decision,
                                            const RewardPolicy& policy);

struct KolmogorovSmirnov {
  double statistic = 0.0;  // largest distance of the two distribution functions, all runs of a side together
  double p = 1.0;          // share of the ways to give runs to sides (paired: to swap pairs) that are as far apart
};
// One list of rewards a run. All ways are tried when there are at most 4096, else 2000 random ones.
KolmogorovSmirnov ks_over_runs(const std::vector<std::vector<double>>& a, const std::vector<std::vector<double>>& b, bool paired,
                               std::uint64_t seed);

// Percentile intervals of means by resampling runs (paired: whole pairs); NaN with one run on a side. Every call sees the same
// resamples.
class Bootstrap {
 public:
  Bootstrap(std::size_t runs_a, std::size_t runs_b, bool paired, std::int64_t resamples, std::uint64_t seed);
  struct Intervals {
    Interval a, b, difference;
  };
  // A number a run.
  Intervals intervals(std::span<const double> a, std::span<const double> b, double confidence) const;

 private:
  std::size_t runs_a_, runs_b_;
  std::int64_t resamples_;
  std::vector<std::uint32_t> picks_a_, picks_b_;  // runs of a resample after each other
};

}  // namespace longstraw::compare
