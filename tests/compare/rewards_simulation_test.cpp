// How often the verdict on rewards is wrong, and how often it finds what is there, over simulated experiments of known laws.
// The rates that this prints are those of docs/comparator.md.

#include "compare/rewards_statistics.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <boost/math/distributions/non_central_t.hpp>
#include <boost/math/distributions/students_t.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

namespace longstraw::compare {
namespace {

constexpr double kLevel = 0.05;
constexpr int kExperiments = 4000;

using Random = std::mt19937_64;
using Draw = std::function<double(Random&)>;

// A rate measured over kExperiments strays by more than this from the true one in one of 30,000 cases (four deviations; where
// less than one event is expected, four events).
double stray(double rate) { return 4 * std::max(std::sqrt(rate * (1 - rate) / kExperiments), 1.0 / kExperiments); }

Draw normal(double mean, double deviation) {
  return [=](Random& random) { return std::normal_distribution<double>(mean, deviation)(random); };
}

// Most seeds near the top, a few far below: one minus an exponential.
Draw skewed(double mean, double deviation) {
  return [=](Random& random) { return mean + deviation - std::exponential_distribution<double>(1 / deviation)(random); };
}

// Shares of 100 prompts answered right, of seeds that differ.
Draw bounded(double mean, double deviation) {
  return [=](Random& random) {
    const double level = std::clamp(std::normal_distribution<double>(mean, deviation)(random), 0.0, 1.0);
    return std::binomial_distribution<int>(100, level)(random) / 100.0;
  };
}

Draw constant(double value) {
  return [=](Random&) { return value; };
}

// A seed either learns the task or stays where it was.
Draw two_outcomes(double share_that_learns) {
  return [=](Random& random) { return std::uniform_real_distribution<double>()(random) < share_that_learns ? 1.0 : 0.375; };
}

struct Law {
  const char* name;
  Draw (*make)(double mean, double deviation);
};
const std::vector<Law>& laws() {
  static const std::vector<Law> all{{"normal", normal}, {"skewed", skewed}, {"bounded", bounded}};
  return all;
}

struct Design {
  std::size_t runs;
  bool paired;
};
const std::vector<Design>& designs() {
  static const std::vector<Design> all{{3, true}, {3, false}, {5, true}, {5, false}, {10, true}, {10, false}};
  return all;
}

struct Rates {
  double equivalent = 0, different = 0;
};

// `shared` is what a seed gives to both of its runs.
Rates rates(const Draw& a, const Draw& b, Design design, const RewardPolicy& policy, const Draw& shared = constant(0)) {
  Random random(20260714);
  int equivalent = 0, different = 0;
  for (int k = 0; k < kExperiments; ++k) {
    std::vector<double> of_a, of_b;
    for (std::size_t i = 0; i < design.runs; ++i) {
      const double both = shared(random);
      of_a.push_back(a(random) + both);
      of_b.push_back(b(random) + both);
    }
    const auto verdict = decide(of_a, of_b, design.paired, policy).verdict;
    equivalent += verdict == RewardVerdict::kEquivalent ? 1 : 0;
    different += verdict == RewardVerdict::kDifferent ? 1 : 0;
  }
  return {static_cast<double>(equivalent) / kExperiments, static_cast<double>(different) / kExperiments};
}

double critical(double degrees, double tail) {
  return boost::math::quantile(boost::math::complement(boost::math::students_t(degrees), tail));
}

// P(T > critical) of the noncentral t.
double power(double shift, double degrees, double critical) {
  return boost::math::cdf(boost::math::complement(boost::math::non_central_t(degrees, shift), critical));
}

void print(const char* what, const char* law, Design d, const Rates& r) {
  fmt::print("{:<28} {:<12} {:>2} {:<8}  equivalent {:.3f}  different {:.3f}\n", what, law, d.runs,
             d.paired ? "paired" : "unpaired", r.equivalent, r.different);
}

TEST(RewardVerdictRates, SidesOfOneLawAreRarelyCalledDifferent) {
  for (const auto& law : laws()) {
    for (const auto design : designs()) {
      const auto side = law.make(0.6, 0.06);
      const Rates found = rates(side, side, design, {.level = kLevel});
      print("one law", law.name, design, found);
      EXPECT_LE(found.different, kLevel + stray(kLevel)) << law.name << " " << design.runs << " " << design.paired;
    }
  }
}

TEST(RewardVerdictRates, NorAreSidesWhoseRunsOftenAgreeExactly) {
  const Draw of_eight_prompts = [](Random& random) {
    return std::round(8 * std::clamp(std::normal_distribution<double>(0.6, 0.1)(random), 0.0, 1.0)) / 8;
  };
  for (const std::size_t runs : {2, 3, 5, 10}) {
    for (const bool paired : {true, false}) {
      for (const auto& [name, side] :
           {std::pair{"half learn", two_outcomes(0.5)}, {"4/5 learn", two_outcomes(0.8)}, {"8 prompts", of_eight_prompts}}) {
        const Rates found = rates(side, side, {runs, paired}, {.level = kLevel});
        print("one law", name, {runs, paired}, found);
        EXPECT_LE(found.different, kLevel + stray(kLevel)) << name << " " << runs << " " << paired;
      }
    }
  }
}

TEST(RewardVerdictRates, ADifferenceOfTheMarginIsRarelyCalledEquivalent) {
  for (const auto& law : laws()) {
    for (const auto design : designs()) {
      for (const double mean_b : {0.57, 0.63}) {
        const Rates found = rates(law.make(0.6, 0.01), law.make(mean_b, 0.01), design, {.level = kLevel});
        print(mean_b < 0.6 ? "5 % less, margin 5 %" : "5 % more, margin 5 %", law.name, design, found);
        EXPECT_LE(found.equivalent, kLevel + stray(kLevel)) << law.name << " " << design.runs << " " << design.paired;
      }
      const Rates absolute = rates(law.make(0.6, 0.01), law.make(0.57, 0.01), design, {.absolute_margin = 0.03, .level = kLevel});
      EXPECT_LE(absolute.equivalent, kLevel + stray(kLevel)) << law.name << " " << design.runs << " " << design.paired;
    }
  }
}

// The mean of A varies much from experiment to experiment, the differences hardly: a margin taken from the mean that happened to
// be measured, as if it were known, would call half of these equivalent.
TEST(RewardVerdictRates, AMarginThatIsAShareOfAnUncertainMeanKeepsItsLevel) {
  for (const std::size_t runs : {3, 5, 10}) {
    const Rates found = rates(normal(0.6, 0.001), normal(0.57, 0.001), {runs, true}, {.level = kLevel}, normal(0, 0.1));
    print("5 % less, seeds alike", "normal", {runs, true}, found);
    EXPECT_LE(found.equivalent, kLevel + stray(kLevel)) << runs;
  }
}

TEST(RewardVerdictRates, FindsADifferenceAsOftenAsTheNoncentralTSays) {
  for (const auto& law : laws()) {
    for (const auto design : designs()) {
      const double deviation = 0.06, difference = 0.3;
      const Rates found = rates(law.make(0.6, deviation), law.make(0.6 - difference, deviation), design, {.level = kLevel});
      print("half the reward is lost", law.name, design, found);
      if (law.make != normal) continue;
      const auto n = static_cast<double>(design.runs);
      const double degrees = design.paired ? n - 1 : 2 * n - 2, shift = difference / (deviation * std::sqrt(2 / n));
      // With as many runs on both sides Welch's t is Student's; only the degrees of freedom that judge it are estimated, between
      // n - 1 and 2n - 2.
      const double most = power(shift, degrees, critical(degrees, kLevel / 2));
      const double least = power(shift, degrees, critical(n - 1, kLevel / 2));
      EXPECT_LE(found.different, most + stray(most)) << design.runs << " " << design.paired;
      EXPECT_GE(found.different, least - stray(least)) << design.runs << " " << design.paired;
    }
  }
}

TEST(RewardVerdictRates, EqualSidesAreFoundEquivalentWhenTheSpreadIsSmallAgainstTheMargin) {
  for (const auto& law : laws()) {
    for (const auto design : designs()) {
      const Rates found = rates(law.make(0.6, 0.01), law.make(0.6, 0.01), design, {.level = kLevel});
      print("one law, spread 1/3 of margin", law.name, design, found);
      if (law.make != normal || !design.paired) continue;
      const auto n = static_cast<double>(design.runs);
      const auto passes = [&](double share) {  // 0.05 · 0.6 in units of the error of B - share · A
        return power(0.03 / (0.01 * std::sqrt((1 + share * share) / n)), n - 1, critical(n - 1, kLevel));
      };
      // Both tests must pass: at least the sum of their powers less one, at most the smaller.
      EXPECT_GE(found.equivalent, passes(0.95) + passes(1.05) - 1 - stray(0.5)) << design.runs;
      EXPECT_LE(found.equivalent, passes(1.05) + stray(0.5)) << design.runs;
    }
  }
}

// What is asked for is enough, if means and spreads are as observed.
TEST(RewardVerdictRates, TheSeedsThatAreAskedForDecideInFourOfFiveCases) {
  struct Observed {
    double mean_b, deviation;
    bool paired;
  };
  for (const auto& o : {Observed{0.5, 0.09, true}, {0.5, 0.09, false}, {0.6, 0.03, true}, {0.61, 0.03, false}}) {
    // Three runs with exactly these means and deviations, unrelated: (1, 1, -2) and (1, -1, 0) are orthogonal and sum to 0.
    const double u = o.deviation / std::sqrt(3.0), v = o.deviation;
    const std::vector<double> a{0.6 + u, 0.6 + u, 0.6 - 2 * u}, b{o.mean_b + v, o.mean_b - v, o.mean_b};
    const RewardPolicy policy{.level = kLevel};
    const auto now = decide(a, b, o.paired, policy);
    ASSERT_EQ(now.verdict, RewardVerdict::kUndecided);
    const auto seeds = seeds_to_decide(a, b, now, policy);
    ASSERT_TRUE(seeds.has_value());
    ASSERT_GT(*seeds, 3);
    const Rates found =
        rates(normal(0.6, o.deviation), normal(o.mean_b, o.deviation), {static_cast<std::size_t>(*seeds), o.paired}, policy);
    print("as many seeds as asked for", "normal", {static_cast<std::size_t>(*seeds), o.paired}, found);
    const double wanted = now.mean_b < 0.57 ? found.different : found.equivalent;
    EXPECT_GE(wanted, 0.8 - stray(0.8)) << o.mean_b << " " << o.paired << ": " << *seeds << " seeds";
  }
}

// The bounds above can fail: the responses of a run are no runs.
TEST(RewardVerdictRates, TakingResponsesForRunsWouldFindDifferencesThatAreNotThere) {
  Random random(20260714);
  int different = 0;
  constexpr int kFew = 400;
  for (int k = 0; k < kFew; ++k) {
    std::vector<double> rows_a, rows_b;
    for (auto* rows : {&rows_a, &rows_b}) {
      for (int run = 0; run < 5; ++run) {
        const double level = std::normal_distribution<double>(0.6, 0.06)(random);
        for (int i = 0; i < 100; ++i) rows->push_back(std::bernoulli_distribution(level)(random) ? 1.0 : 0.0);
      }
    }
    different += decide(rows_a, rows_b, false, {.level = kLevel}).verdict == RewardVerdict::kDifferent ? 1 : 0;
  }
  fmt::print("responses taken for runs: different {:.3f}\n", static_cast<double>(different) / kFew);
  EXPECT_GT(static_cast<double>(different) / kFew, kLevel + 4 * std::sqrt(kLevel * (1 - kLevel) / kFew));
}

// No statistics on a few runs can see what none of them shows. The verdict says how much that may be.
TEST(RewardVerdictRates, RareFailuresAreNotSeenAndTheNoteSaysSo) {
  for (const std::size_t runs : {3, 5, 10}) {
    // 8 % of seeds stay at 0.375: 5 % of the mean.
    const Rates found = rates(constant(1), two_outcomes(0.92), {runs, true}, {.level = kLevel});
    print("8 % of seeds of B fail", "two outcomes", {runs, true}, found);
    EXPECT_NEAR(found.equivalent, std::pow(0.92, static_cast<double>(runs)), stray(0.5));
  }
  const std::vector<double> ones(5, 1.0);
  const auto decision = decide(ones, ones, true, {});
  EXPECT_EQ(decision.verdict, RewardVerdict::kEquivalent);
  ASSERT_EQ(decision.notes.size(), 1u);
  EXPECT_NE(decision.notes[0].find("up to 45 % of seeds"), std::string::npos) << decision.notes[0];
}

}  // namespace
}  // namespace longstraw::compare
