// Tests, bootstrap and permutations behind a verdict on rewards are scipy's, and the three zones are where they should be.

#include "compare/rewards_statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace longstraw::compare {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Values = std::vector<double>;

// Expected values by scipy 1.17.1, on these numbers: stats.ttest_rel(b, a), ttest_ind(c, a, equal_var=False)
// with their confidence_interval(0.9); the margin's tests as ttest_rel(b, 0.95 * a, alternative="greater"), ttest_rel(b, 1.05 * a,
// alternative="less") and likewise; ks_2samp, with p by counting ks_2samp over itertools.combinations and product of the runs.
const Values kA{0.71, 0.64, 0.80, 0.68, 0.75}, kB{0.69, 0.66, 0.74, 0.65, 0.77}, kC{0.31, 0.52, 0.44, 0.36};
constexpr double kClose = 1e-12;  // both sides sum a few numbers near 1 in double and evaluate the same function

TEST(RewardStatistics, PairedTestsAreScipys) {
  const auto d = decide(kA, kB, true, {});
  EXPECT_NEAR(d.t, -0.911322376865767, kClose);
  EXPECT_EQ(d.degrees, 4);
  EXPECT_NEAR(d.p_different, 0.41367853187424564, kClose);
  EXPECT_NEAR(d.difference.low, -0.046750051755800666, kClose);
  EXPECT_NEAR(d.difference.high, 0.01875005175580062, kClose);
  EXPECT_NEAR(d.p_lower, 0.10543195180421754, kClose);
  EXPECT_NEAR(d.p_upper, 0.018453512527698453, kClose);
  EXPECT_NEAR(d.effect_size, -0.3251824460311758, kClose);
  EXPECT_NEAR(d.margin, 0.05 * 0.716, kClose);
  EXPECT_EQ(d.verdict, RewardVerdict::kUndecided);
}

TEST(RewardStatistics, AnAbsoluteMarginIsScipysOneSampleTest) {
  const auto d = decide(kA, kB, true, {.absolute_margin = 0.06});
  EXPECT_NEAR(d.p_lower, 0.020082715921668024, kClose);
  EXPECT_NEAR(d.p_upper, 0.0042708573262022955, kClose);
  EXPECT_EQ(d.verdict, RewardVerdict::kEquivalent);
}

TEST(RewardStatistics, UnpairedTestsAreScipysWelch) {
  const auto d = decide(kA, kC, false, {});
  EXPECT_NEAR(d.t, -5.73967974856778, kClose * 10);
  EXPECT_NEAR(d.degrees, 5.061313387840787, kClose * 10);
  EXPECT_NEAR(d.p_different, 0.002160915453494928, kClose);
  EXPECT_NEAR(d.difference.low, -0.4165169624554103, kClose);
  EXPECT_NEAR(d.difference.high, -0.20048303754458996, kClose);
  EXPECT_NEAR(d.p_lower, 0.9980509765437188, kClose);
  EXPECT_NEAR(d.p_upper, 0.000614287024267733, kClose);
  EXPECT_NEAR(d.effect_size, -3.4909821553816403, kClose * 10);
  EXPECT_EQ(d.verdict, RewardVerdict::kDifferent);
  const auto wide = decide(kA, kC, false, {.margin = 0.6});
  EXPECT_NEAR(wide.p_lower, 0.037456170880163335, kClose);
  EXPECT_NEAR(wide.p_upper, 5.285783372443645e-06, kClose);
}

TEST(RewardStatistics, KolmogorovSmirnovIsScipysWithRunsPermuted) {
  const std::vector<Values> a{{0.1, 0.4, 0.4, 0.9}, {0.2, 0.5, 0.5, 1.0}, {0.3, 0.3, 0.8, 0.6}};
  const std::vector<Values> b{{0.1, 0.2, 0.2, 0.4}, {0.6, 0.1, 0.0, 0.3}, {0.2, 0.0, 0.5, 0.1}};
  const auto unpaired = ks_over_runs(a, b, false, 0), paired = ks_over_runs(a, b, true, 0);
  EXPECT_NEAR(unpaired.statistic, 0.5, kClose);
  EXPECT_NEAR(unpaired.p, 2.0 / 20, kClose);
  EXPECT_NEAR(paired.statistic, 0.5, kClose);
  EXPECT_NEAR(paired.p, 2.0 / 8, kClose);
}

TEST(RewardStatistics, ManyRunsArePermutedAtRandomAndAgreeWithAll) {
  // Runs of one reward each, B's above all of A's: only the observed arrangement and its mirror are as far apart.
  std::vector<Values> a, b;
  for (int i = 0; i < 20; ++i) {
    a.push_back({0.01 * i});
    b.push_back({1 + 0.01 * i});
  }
  for (const bool paired : {true, false}) {
    const auto ks = ks_over_runs(a, b, paired, 3);
    EXPECT_EQ(ks.statistic, 1);
    EXPECT_EQ(ks.p, 1.0 / 2001);
    EXPECT_EQ(ks_over_runs(a, a, paired, 3).p, 1);
  }
}

TEST(RewardStatistics, SeedsToDecideAreWhereScipysNoncentralTPassesFourFifths) {
  // scipy.stats.nct.sf(t.ppf(.975, n - 1), n - 1, .1875 * sqrt(n) / .2286737122335374) passes 0.8 at n = 14.
  const Values a{0.65, 0.45, 0.60, 0.55}, b{0.30, 0.60, 0.30, 0.30};
  const auto different = decide(a, b, true, {});
  ASSERT_EQ(different.verdict, RewardVerdict::kUndecided);
  EXPECT_EQ(seeds_to_decide(a, b, different, {}), 14);
  // nct.sf(t.ppf(.95, n - 1), n - 1, (.03 - .005) * sqrt(n) / .031091263510296053) + nct.cdf(-t.ppf(.95, n - 1), n - 1,
  // (-.005 - .03) * sqrt(n) / .031091263510296053) - 1 passes it at n = 12.
  const Values c{0.5, 0.5, 0.5, 0.5}, e{0.53, 0.48, 0.51, 0.46};
  const RewardPolicy policy{.absolute_margin = 0.03};
  const auto equivalent = decide(c, e, true, policy);
  ASSERT_EQ(equivalent.verdict, RewardVerdict::kUndecided);
  EXPECT_EQ(seeds_to_decide(c, e, equivalent, policy), 12);
}

TEST(RewardStatistics, NoNumberOfSeedsDecidesADifferenceOfJustTheMargin) {
  const Values a{0.5, 0.6, 0.4, 0.5}, b{0.57, 0.61, 0.48, 0.54};
  const RewardPolicy policy{.absolute_margin = 0.05000001};
  const auto d = decide(a, b, true, policy);
  ASSERT_EQ(d.verdict, RewardVerdict::kUndecided);
  EXPECT_EQ(seeds_to_decide(a, b, d, policy), std::nullopt);
}

TEST(RewardStatistics, TheBootstrapResamplesPairsAsPairs) {
  const Values a{0.1, 0.5, 0.9, 0.3}, b{0.2, 0.6, 1.0, 0.4};
  const auto paired = Bootstrap(4, 4, true, 1000, 1).intervals(a, b, 0.9);
  EXPECT_NEAR(paired.difference.low, 0.1, kClose);
  EXPECT_NEAR(paired.difference.high, 0.1, kClose);
  const auto unpaired = Bootstrap(4, 4, false, 1000, 1).intervals(a, b, 0.9);
  EXPECT_LT(unpaired.difference.low, 0);
  EXPECT_GT(unpaired.difference.high, 0.2);
}

TEST(RewardStatistics, TheBootstrapIsTheLawOfAllResamples) {
  const Values a{0.1, 0.5, 0.9, 0.3};
  Values means;
  for (int k = 0; k < 256; ++k) means.push_back((a[k & 3] + a[k >> 2 & 3] + a[k >> 4 & 3] + a[k >> 6]) / 4);
  std::sort(means.begin(), means.end());
  const auto quantile = [&](double share) { return means[static_cast<std::size_t>(share * 256)]; };
  const auto interval = Bootstrap(4, 4, true, 20000, 2).intervals(a, a, 0.9).a;
  const double stray = 4 * std::sqrt(0.05 * 0.95 / 20000);  // of the share of resamples below the true quantile
  EXPECT_GE(interval.low, quantile(0.05 - stray) - kClose);
  EXPECT_LE(interval.low, quantile(0.05 + stray) + kClose);
  EXPECT_GE(interval.high, quantile(0.95 - stray) - kClose);
  EXPECT_LE(interval.high, quantile(0.95 + stray) + kClose);
}

// --- The zones.
TEST(RewardVerdict, OneRunASideIsUndecidedWhateverItEarns) {
  for (const double b : {0.5, 0.0}) {
    for (const bool paired : {true, false}) {
      const auto d = decide(Values{0.5}, Values{b}, paired, {});
      EXPECT_EQ(d.verdict, RewardVerdict::kUndecided);
      EXPECT_THAT(d.notes, ElementsAre(HasSubstr("one run a side")));
      EXPECT_EQ(seeds_to_decide(Values{0.5}, Values{b}, d, {}), std::nullopt);
    }
  }
  EXPECT_EQ(decide(Values{0.5}, kB, false, {}).verdict, RewardVerdict::kUndecided);
}

TEST(RewardVerdict, ASignificantDifferenceInsideTheMarginIsEquivalent) {
  const Values a{0.50, 0.60, 0.55, 0.52}, b{0.501, 0.6011, 0.551, 0.5209};
  const auto d = decide(a, b, true, {});
  EXPECT_LT(d.p_different, 0.05);
  EXPECT_EQ(d.verdict, RewardVerdict::kEquivalent);
  EXPECT_THAT(d.notes, ElementsAre(HasSubstr("smaller than the margin")));
}

TEST(RewardVerdict, ASignificantDifferenceAcrossTheMarginIsUndecided) {
  const Values a{0.50, 0.60, 0.55, 0.52}, b{0.515, 0.64, 0.565, 0.542};  // 0.023 more, up to 0.038; the margin is 0.027
  const auto d = decide(a, b, true, {});
  EXPECT_LE(d.p_different, 0.05);
  EXPECT_GT(d.difference.high, d.margin);
  EXPECT_EQ(d.verdict, RewardVerdict::kUndecided);
}

TEST(RewardVerdict, WithoutSpreadTheMarginDecides) {
  const Values ones(3, 1.0);
  EXPECT_EQ(decide(ones, ones, true, {}).verdict, RewardVerdict::kEquivalent);
  EXPECT_EQ(decide(ones, Values(3, 0.96), true, {}).verdict, RewardVerdict::kEquivalent);
  const auto less = decide(ones, Values(3, 0.9), true, {});
  EXPECT_EQ(less.verdict, RewardVerdict::kDifferent);
  EXPECT_DOUBLE_EQ(less.p_different, 2.0 / 64);  // two outcomes of equal chance: 2 of the 2^6 ways
  EXPECT_THAT(less.notes, ElementsAre(HasSubstr("without any spread")));
  EXPECT_EQ(decide(ones, Values(3, 0.9), false, {}).verdict, RewardVerdict::kDifferent);
  // Two runs a side fall so by chance in one of eight cases.
  EXPECT_EQ(decide(Values(2, 1.0), Values(2, 0.5), true, {}).verdict, RewardVerdict::kUndecided);
}

TEST(RewardVerdict, SpreadOfRoundingSizeIsNone) {
  const Values a{0.1 + 0.2, 0.3, 0.3}, b{0.3, 0.3, 0.1 + 0.2};
  EXPECT_EQ(decide(a, b, true, {}).verdict, RewardVerdict::kEquivalent);
  EXPECT_EQ(decide(a, b, true, {}).p_different, 1);
}

TEST(RewardVerdict, EqualDifferencesOfRunsThatDifferAreACoincidence) {
  const auto d = decide(Values{0.75, 0.5}, Values{0.625, 0.375}, true, {});
  EXPECT_FALSE(d.paired);
  EXPECT_EQ(d.verdict, RewardVerdict::kUndecided);
  EXPECT_THAT(d.notes, ::testing::Contains(HasSubstr("coincidence")));
}

TEST(RewardVerdict, PairsThatEarnExactlyTheSameAreEquivalentThoughSeedsDiffer) {
  EXPECT_EQ(decide(kA, kA, true, {}).verdict, RewardVerdict::kEquivalent);
}

TEST(RewardVerdict, TwoSidesThatLearnedNothingAreNotEquivalent) {
  for (const Values& a : {Values{0, 0, 0}, Values{0.02, -0.03, 0.01}}) {
    const auto d = decide(a, a, true, {});
    EXPECT_EQ(d.verdict, RewardVerdict::kUndecided);
    EXPECT_THAT(d.notes, ::testing::Contains(HasSubstr("--absolute-margin")));
    EXPECT_EQ(decide(a, a, true, {.absolute_margin = 0.1}).verdict, RewardVerdict::kEquivalent);
  }
}

TEST(RewardVerdict, RewardsBelowZeroHaveAMarginToo) {
  Values a = kA, b = kB;
  for (auto* side : {&a, &b}) {
    for (double& v : *side) v = -v;
  }
  const auto d = decide(a, b, true, {}), mirror = decide(kA, kB, true, {});
  EXPECT_DOUBLE_EQ(d.margin, mirror.margin);
  EXPECT_DOUBLE_EQ(d.p_lower, mirror.p_upper);
  EXPECT_DOUBLE_EQ(d.p_upper, mirror.p_lower);
}

}  // namespace
}  // namespace longstraw::compare
