#include "compare/rewards_statistics.h"

#include <boost/math/distributions/students_t.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <random>

namespace longstraw::compare {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kMostArrangements = 4096;
constexpr std::int64_t kRandomArrangements = 2000;

struct Moments {
  double mean = 0.0, variance = 0.0;
};

// What sums of these numbers may be off by: differences below it are none.
double rounding_of(std::span<const double> a, std::span<const double> b, double shift = 0) {
  double largest = std::abs(shift);
  for (const double v : a) largest = std::max(largest, std::abs(v));
  for (const double v : b) largest = std::max(largest, std::abs(v));
  return 4 * static_cast<double>(a.size() + b.size()) * std::numeric_limits<double>::epsilon() * largest;
}

Moments moments(std::span<const double> values, double rounding) {
  Moments m;
  const auto n = static_cast<double>(values.size());
  for (const double v : values) m.mean += v / n;
  for (const double v : values) m.variance += (v - m.mean) * (v - m.mean) / (n - 1);
  if (m.variance <= rounding * rounding) m.variance = 0;
  return m;
}

std::vector<double> differences(std::span<const double> a, std::span<const double> b, double scale, double shift) {
  std::vector<double> result;
  for (std::size_t i = 0; i < a.size(); ++i) result.push_back(b[i] - scale * a[i] - shift);
  return result;
}

Interval percentiles(std::vector<double>& values, double confidence) {
  const auto at = [&](double share) {
    const auto place = static_cast<std::ptrdiff_t>(std::lround(share * static_cast<double>(values.size() - 1)));
    std::nth_element(values.begin(), values.begin() + place, values.end());
    return values[static_cast<std::size_t>(place)];
  };
  const double tail = (1 - confidence) / 2;
  return {at(tail), at(1 - tail)};
}

// Rewards of all runs in rising order, equal ones of a run together: one pass gives the statistic of any arrangement.
struct SortedRewards {
  struct Entry {
    double value;
    std::size_t run;
    double count;
  };
  std::vector<Entry> entries;
  std::vector<double> sizes;  // of each run

  explicit SortedRewards(const std::vector<const std::vector<double>*>& runs) {
    std::map<std::pair<double, std::size_t>, double> counts;
    for (std::size_t r = 0; r < runs.size(); ++r) {
      for (const double v : *runs[r]) counts[{v, r}] += 1;
      sizes.push_back(static_cast<double>(runs[r]->size()));
    }
    for (const auto& [key, count] : counts) entries.push_back({key.first, key.second, count});
  }

  double statistic(const std::vector<bool>& in_b) const {
    double size_a = 0, size_b = 0;
    for (std::size_t r = 0; r < sizes.size(); ++r) (in_b[r] ? size_b : size_a) += sizes[r];
    double below_a = 0, below_b = 0, largest = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      (in_b[entries[i].run] ? below_b : below_a) += entries[i].count;
      if (i + 1 < entries.size() && entries[i + 1].value == entries[i].value) continue;
      largest = std::max(largest, std::abs(below_a / size_a - below_b / size_b));
    }
    return largest;
  }
};

// Calls `visit` with every arrangement, or with random ones; returns whether they were all.
template <class Visit>
bool for_arrangements(std::size_t runs_a, std::size_t runs_b, bool paired, std::uint64_t seed, const Visit& visit) {
  const std::size_t runs = runs_a + runs_b;
  std::vector<bool> in_b(runs);
  const auto swap_pairs = [&](const auto& swapped) {
    for (std::size_t i = 0; i < runs_a; ++i) {
      in_b[i] = swapped(i);
      in_b[runs_a + i] = !in_b[i];
    }
    visit(in_b);
  };
  if (paired && runs_a <= 12) {
    for (std::uint64_t mask = 0; mask < std::uint64_t{1} << runs_a; ++mask)
      swap_pairs([&](std::size_t i) { return mask >> i & 1; });
    return true;
  }
  // C(14, 7) = 3432 is the largest below kMostArrangements.
  static_assert(kMostArrangements >= 3432);
  if (!paired && runs <= 14) {
    for (std::uint64_t mask = 0; mask < std::uint64_t{1} << runs; ++mask) {
      if (static_cast<std::size_t>(std::popcount(mask)) != runs_b) continue;
      for (std::size_t r = 0; r < runs; ++r) in_b[r] = mask >> r & 1;
      visit(in_b);
    }
    return true;
  }
  std::mt19937_64 random(seed);
  for (std::int64_t k = 0; k < kRandomArrangements; ++k) {
    if (paired) {
      swap_pairs([&](std::size_t) { return random() >> 63; });
    } else {
      for (std::size_t r = 0; r < runs; ++r) in_b[r] = r >= runs_a;
      for (std::size_t r = runs - 1; r > 0; --r) {
        const std::size_t other = random() % (r + 1);
        const bool side = in_b[r];
        in_b[r] = in_b[other];
        in_b[other] = side;
      }
      visit(in_b);
    }
  }
  return false;
}

}  // namespace

double Contrast::t() const {
  if (error > 0) return estimate / error;
  return estimate == 0 ? 0 : std::copysign(kInfinity, estimate);
}

Contrast contrast_of(std::span<const double> a, std::span<const double> b, bool paired, double scale, double shift) {
  Contrast c;
  const double rounding = rounding_of(a, b, shift);
  if (paired) {
    const Moments m = moments(differences(a, b, scale, shift), rounding);
    const auto n = static_cast<double>(a.size());
    c.estimate = m.mean;
    c.unit_error = std::sqrt(m.variance);
    c.error = c.unit_error / std::sqrt(n);
    c.unit_degrees = 1;
    c.degrees = n - 1;
  } else {
    const Moments ma = moments(a, rounding), mb = moments(b, rounding);
    const auto na = static_cast<double>(a.size()), nb = static_cast<double>(b.size());
    const double va = scale * scale * ma.variance, vb = mb.variance;
    c.estimate = mb.mean - scale * ma.mean - shift;
    c.unit_error = std::sqrt(va + vb);
    c.error = std::sqrt(va / na + vb / nb);
    const double each = va * va / (na * na * (na - 1)) + vb * vb / (nb * nb * (nb - 1));
    c.degrees = c.error > 0 ? c.error * c.error * c.error * c.error / each : na + nb - 2;
    c.unit_degrees = c.error > 0 ? (va + vb) * (va + vb) / (va * va + vb * vb) : 2;
  }
  if (std::abs(c.estimate) <= rounding) c.estimate = 0;
  return c;
}

double p_above(const Contrast& c) {
  if (c.error == 0) return c.estimate > 0 ? 0 : 1;
  return boost::math::cdf(boost::math::complement(boost::math::students_t(c.degrees), c.t()));
}

double p_below(const Contrast& c) {
  if (c.error == 0) return c.estimate < 0 ? 0 : 1;
  return boost::math::cdf(boost::math::students_t(c.degrees), c.t());
}

double p_either(const Contrast& c) {
  if (c.error == 0) return c.estimate == 0 ? 1 : 0;
  return 2 * boost::math::cdf(boost::math::complement(boost::math::students_t(c.degrees), std::abs(c.t())));
}

Interval t_interval(const Contrast& c, double confidence) {
  if (c.error == 0) return {c.estimate, c.estimate};
  const double t = boost::math::quantile(boost::math::complement(boost::math::students_t(c.degrees), (1 - confidence) / 2));
  return {c.estimate - t * c.error, c.estimate + t * c.error};
}

double hedges_g(std::span<const double> a, std::span<const double> b, bool paired) {
  const Contrast c = contrast_of(a, b, paired);
  const double degrees = static_cast<double>(paired ? a.size() - 1 : a.size() + b.size() - 2);
  const double deviation = paired ? c.unit_error : c.unit_error / std::sqrt(2.0);
  if (deviation == 0) return c.t();
  if (degrees <= 1) return std::numeric_limits<double>::quiet_NaN();
  const double unbiased = std::exp(std::lgamma(degrees / 2) - std::lgamma((degrees - 1) / 2)) / std::sqrt(degrees / 2);
  return c.estimate / deviation * unbiased;
}

KolmogorovSmirnov ks_over_runs(const std::vector<std::vector<double>>& a, const std::vector<std::vector<double>>& b, bool paired,
                               std::uint64_t seed) {
  std::vector<const std::vector<double>*> runs;
  for (const auto& run : a) runs.push_back(&run);
  for (const auto& run : b) runs.push_back(&run);
  const SortedRewards rewards(runs);
  std::vector<bool> in_b(runs.size());
  for (std::size_t r = a.size(); r < runs.size(); ++r) in_b[r] = true;
  KolmogorovSmirnov result{.statistic = rewards.statistic(in_b), .p = 1.0};
  double tried = 0, as_far = 0;
  const double enough = result.statistic * (1 - 1e-12);
  const bool all = for_arrangements(a.size(), b.size(), paired, seed, [&](const std::vector<bool>& arrangement) {
    tried += 1;
    as_far += rewards.statistic(arrangement) >= enough ? 1 : 0;
  });
  // Random arrangements do not hold the one that was observed.
  result.p = all ? as_far / tried : (as_far + 1) / (tried + 1);
  return result;
}

Bootstrap::Bootstrap(std::size_t runs_a, std::size_t runs_b, bool paired, std::int64_t resamples, std::uint64_t seed)
    : runs_a_(runs_a), runs_b_(runs_b), resamples_(resamples) {
  std::mt19937_64 random(seed);
  const auto draw = [&](std::size_t runs) {
    std::vector<std::uint32_t> picks(static_cast<std::size_t>(resamples) * runs);
    for (auto& pick : picks) pick = static_cast<std::uint32_t>(random() % runs);
    return picks;
  };
  picks_a_ = draw(runs_a);
  picks_b_ = paired ? picks_a_ : draw(runs_b);
}

Bootstrap::Intervals Bootstrap::intervals(std::span<const double> a, std::span<const double> b, double confidence) const {
  const double unknown = std::numeric_limits<double>::quiet_NaN();
  if (runs_a_ < 2 || runs_b_ < 2) return {{unknown, unknown}, {unknown, unknown}, {unknown, unknown}};
  std::vector<double> means_a, means_b, means_difference;
  const auto mean = [](std::span<const double> values, const std::uint32_t* picks) {
    double sum = 0;
    for (std::size_t i = 0; i < values.size(); ++i) sum += values[picks[i]];
    return sum / static_cast<double>(values.size());
  };
  for (std::size_t k = 0; k < static_cast<std::size_t>(resamples_); ++k) {
    means_a.push_back(mean(a, &picks_a_[k * runs_a_]));
    means_b.push_back(mean(b, &picks_b_[k * runs_b_]));
    means_difference.push_back(means_b.back() - means_a.back());
  }
  return {.a = percentiles(means_a, confidence),
          .b = percentiles(means_b, confidence),
          .difference = percentiles(means_difference, confidence)};
}

}  // namespace longstraw::compare
