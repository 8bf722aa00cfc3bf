// The verdict: three zones, and what it would take to leave the one in the middle.

#include "compare/rewards_statistics.h"

#include <boost/math/distributions/non_central_t.hpp>
#include <boost/math/distributions/normal.hpp>
#include <boost/math/distributions/students_t.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace longstraw::compare {
namespace {

constexpr double kPower = 0.8;

// The one-sided tests of equivalence: B above A's lower limit, and below its upper limit.
struct MarginTests {
  Contrast lower, upper;
};

// A margin relative to A's mean scales A itself: its mean is an estimate, and its error belongs into the test's.
MarginTests margin_tests(std::span<const double> a, std::span<const double> b, bool paired, double mean_a,
                         const RewardPolicy& policy) {
  if (policy.absolute_margin) {
    return {.lower = contrast_of(a, b, paired, 1, -*policy.absolute_margin),
            .upper = contrast_of(a, b, paired, 1, *policy.absolute_margin)};
  }
  const double share = mean_a < 0 ? -policy.margin : policy.margin;
  return {.lower = contrast_of(a, b, paired, 1 - share), .upper = contrast_of(a, b, paired, 1 + share)};
}

// P(T > critical) for a noncentral t.
double power_above(double shift, double degrees, double critical) {
  if (!std::isfinite(shift)) return shift > 0 ? 1 : 0;
  // The noncentral t is then a normal one to three digits, and its series would be long.
  if (degrees > 200 || std::abs(shift) > 30) {
    return boost::math::cdf(boost::math::complement(boost::math::normal(), critical - shift));
  }
  return boost::math::cdf(boost::math::complement(boost::math::non_central_t(degrees, shift), critical));
}

double shift_at(const Contrast& c, double n) {
  if (c.unit_error > 0) return c.estimate * std::sqrt(n) / c.unit_error;
  return c.estimate == 0 ? 0 : std::copysign(std::numeric_limits<double>::infinity(), c.estimate);
}

double critical_t(double degrees, double tail) {
  return boost::math::quantile(boost::math::complement(boost::math::students_t(degrees), tail));
}

// That n seeds a side say `equivalent`: both one-sided tests.
double power_equivalent(const MarginTests& tests, double n, double level) {
  const auto one = [&](const Contrast& c, double sign) {
    const double degrees = c.unit_degrees * (n - 1);
    return power_above(sign * shift_at(c, n), degrees, critical_t(degrees, level));
  };
  return std::max(0.0, one(tests.lower, 1) + one(tests.upper, -1) - 1);
}

// That n seeds a side say `different`: significant, and an estimate beyond the margin.
double power_different(const Contrast& c, double margin, double n, double level) {
  const double degrees = c.unit_degrees * (n - 1);
  const double significant = power_above(std::abs(shift_at(c, n)), degrees, critical_t(degrees, level / 2));
  const double distance = (std::abs(c.estimate) - margin) * std::sqrt(n);
  if (c.unit_error == 0) return distance > 0 ? significant : 0;
  return std::min(significant, boost::math::cdf(boost::math::normal(), distance / c.unit_error));
}

// The fewest seeds a side with that power; power rises with n, where it can be reached at all.
template <class Power>
std::optional<std::int64_t> fewest_seeds(std::int64_t from, const Power& power) {
  if (power(static_cast<double>(kMostSeedsAsked)) < kPower) return std::nullopt;
  std::int64_t low = from, high = kMostSeedsAsked;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (power(static_cast<double>(middle)) >= kPower) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return high;
}

double mean_of(std::span<const double> values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

bool all_equal(std::span<const double> values) {
  return std::all_of(values.begin(), values.end(), [&](double v) { return v == values.front(); });
}

// Two sides without a spread: the largest probability, over all laws, that runs of one law fall so. It is reached by a law of two
// outcomes, p of one and 1 - p of the other: p^na (1-p)^nb + p^nb (1-p)^na, at most twice the maximum of either term.
double chance_of_two_constants(std::size_t runs_a, std::size_t runs_b) {
  const auto na = static_cast<double>(runs_a), nb = static_cast<double>(runs_b);
  const double n = na + nb;
  return std::min(1.0, 2 * std::pow(na / n, na) * std::pow(nb / n, nb));
}

// Rewards that are shares of few prompts make equal differences by chance.
bool pairs_coincide(std::span<const double> a, std::span<const double> b) {
  const Contrast c = contrast_of(a, b, /*paired=*/true);
  return c.error == 0 && c.estimate != 0 && !(all_equal(a) && all_equal(b));
}

std::string no_spread_note(std::size_t runs, bool paired, double level) {
  return fmt::format(
      "{} without any spread between {}: that does not exclude that up to {:.0f} % of seeds would do otherwise (at level {})",
      paired ? fmt::format("{} pairs", runs) : fmt::format("{} runs a side", runs), paired ? "differences" : "runs",
      100 * (1 - std::pow(level, 1 / static_cast<double>(runs))), level);
}

// Whether A's mean is so far from zero that a share of it means something.
bool mean_is_clear(std::span<const double> a, double mean_a, double level) {
  const std::vector<double> zeros(a.size(), 0.0);
  const Contrast c = contrast_of(zeros, a, /*paired=*/true);
  return mean_a < 0 ? p_below(c) <= level : p_above(c) <= level;
}

}  // namespace

RewardDecision decide(std::span<const double> a, std::span<const double> b, bool paired, const RewardPolicy& policy) {
  RewardDecision d{.mean_a = mean_of(a), .mean_b = mean_of(b)};
  d.margin = policy.absolute_margin.value_or(policy.margin * std::abs(d.mean_a));
  const std::size_t runs = std::min(a.size(), b.size());
  if (runs < 2) {
    const double unknown = std::numeric_limits<double>::quiet_NaN();
    d.difference = {unknown, unknown};
    d.effect_size = d.t = d.degrees = d.p_different = d.p_lower = d.p_upper = unknown;
    d.notes.emplace_back("one run a side says nothing about other seeds; wanted two at least, better five");
    return d;
  }
  d.paired = paired && !pairs_coincide(a, b);
  if (d.paired != paired) {
    d.notes.emplace_back(
        "all pairs differ by the same, though runs differ from each other: taken as a coincidence, and tested without pairing");
  }
  const Contrast difference = contrast_of(a, b, d.paired);
  d.difference = t_interval(difference, 1 - 2 * policy.level);
  d.t = difference.t();
  d.degrees = difference.degrees;
  d.effect_size = hedges_g(a, b, d.paired);
  d.p_different =
      difference.error == 0 && difference.estimate != 0 ? chance_of_two_constants(a.size(), b.size()) : p_either(difference);
  if (difference.error == 0) d.notes.push_back(no_spread_note(runs, d.paired, policy.level));
  if (policy.absolute_margin || mean_is_clear(a, d.mean_a, policy.level)) {
    const MarginTests tests = margin_tests(a, b, d.paired, d.mean_a, policy);
    d.p_lower = p_above(tests.lower);
    d.p_upper = p_below(tests.upper);
  } else {
    d.notes.emplace_back(
        "A's mean can't be told from zero, so a share of it is no margin, and nothing is equivalent by it; wanted --absolute-margin");
  }
  const bool significant = d.p_different <= policy.level;
  if (std::max(d.p_lower, d.p_upper) <= policy.level) {
    d.verdict = RewardVerdict::kEquivalent;
    if (significant) d.notes.emplace_back("the difference is significant, and smaller than the margin: it does not matter");
  } else if (significant && std::abs(d.mean_b - d.mean_a) > d.margin) {
    d.verdict = RewardVerdict::kDifferent;
  }
  return d;
}

std::optional<std::int64_t> seeds_to_decide(std::span<const double> a, std::span<const double> b, const RewardDecision& decision,
                                            const RewardPolicy& policy) {
  const std::size_t runs = std::min(a.size(), b.size());
  if (decision.verdict != RewardVerdict::kUndecided || runs < 2) return std::nullopt;
  const auto from = static_cast<std::int64_t>(runs) + 1;
  if (std::abs(decision.mean_b - decision.mean_a) > decision.margin) {
    const Contrast difference = contrast_of(a, b, decision.paired);
    return fewest_seeds(from, [&](double n) { return power_different(difference, decision.margin, n, policy.level); });
  }
  if (!policy.absolute_margin && !mean_is_clear(a, decision.mean_a, policy.level)) return std::nullopt;
  const MarginTests tests = margin_tests(a, b, decision.paired, decision.mean_a, policy);
  return fewest_seeds(from, [&](double n) { return power_equivalent(tests, n, policy.level); });
}

}  // namespace longstraw::compare
