// The formulas of statistics.h against direct computation, their limits, and that merging does not matter.

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "compare/statistics.h"

namespace longstraw::compare {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

PairStatistics pair(const std::vector<double>& reference, const std::vector<double>& candidate) {
  PairStatistics s;
  accumulate(s, 0, reference.data(), candidate.data(), static_cast<std::int64_t>(reference.size()));
  return s;
}

// Sums of n products in double (in a tree of blocks, so that far fewer than n roundings add up) against long double.
double sum_tolerance(std::size_t n) { return 4 * static_cast<double>(n) * std::numeric_limits<double>::epsilon(); }

// Any double: also subnormal, huge, zero, infinite and NaN, which RapidCheck's own generator never makes.
rc::Gen<double> any_double() {
  return rc::gen::weightedOneOf<double>(
      {{6, rc::gen::map(rc::gen::inRange(-1000000, 1000000), [](int v) { return v * 1e-6; })},
       {2, rc::gen::map(rc::gen::arbitrary<std::uint64_t>(), [](std::uint64_t bits) { return std::bit_cast<double>(bits); })},
       {1, rc::gen::element(0.0, -0.0, kInfinity, -kInfinity, kNan, 5e-324, -2.2e-308, 1.7e308)}});
}

rc::Gen<double> finite_double() {
  return rc::gen::suchThat(any_double(), [](double v) { return std::isfinite(v) && std::abs(v) < 1e150; });
}

TEST(Statistics, AgreesWithTheFormulas) {
  const std::vector<double> b{1, -2, 3, 0, 0.5}, a{1.5, -2, 2, 0, -0.5};
  const auto s = pair(b, a);
  const double dot = 1.5 + 4 + 6 - 0.25, bb = 1 + 4 + 9 + 0.25, aa = 2.25 + 4 + 4 + 0.25, dd = 0.25 + 1 + 1;
  EXPECT_DOUBLE_EQ(s.cosine(), dot / std::sqrt(aa * bb));
  EXPECT_DOUBLE_EQ(s.relative_l2(), std::sqrt(dd / bb));
  EXPECT_DOUBLE_EQ(s.norm_ratio(), std::sqrt(aa / bb));
  EXPECT_DOUBLE_EQ(s.sign_agreement(), 4.0 / 5);
  EXPECT_EQ(s.max_error, 1);
  EXPECT_EQ(s.max_error_index, 2);
  EXPECT_NEAR(s.update_cosine(), 2.0 / 4, 1e-7);  // signs: 1, 1, 1, none, -1, each within 1e-8 / 0.5 of it
}

TEST(Statistics, UpdateOfATinyGradientIsNoSign) {
  // At |g| = epsilon the update is half a step: the two parameters weigh unequally.
  const auto s = pair({1, 1e-8}, {1, -1e-8});
  EXPECT_NEAR(s.update_cosine(), (1 - 0.25) / (1 + 0.25), 1e-7);
}

TEST(Statistics, ZeroAgainstZeroIsNoError) {
  const auto s = pair({0, 0}, {0, -0.0});
  EXPECT_EQ(s.relative_l2(), 0);
  EXPECT_EQ(s.cosine(), 1);
  EXPECT_EQ(s.norm_ratio(), 1);
  EXPECT_EQ(s.update_cosine(), 1);
  EXPECT_EQ(s.sign_agreement(), 1);
}

TEST(Statistics, ZeroAgainstNonZeroIsInfinite) {
  const auto s = pair({0, 0}, {0, 1e-300});
  EXPECT_EQ(s.relative_l2(), kInfinity);
  EXPECT_EQ(s.norm_ratio(), kInfinity);
  EXPECT_EQ(s.cosine(), 0);
  const auto lost = pair({0, 1e-300}, {0, 0});
  EXPECT_EQ(lost.relative_l2(), 1);
  EXPECT_EQ(lost.cosine(), 0);
  EXPECT_EQ(lost.candidate_nonzero, 0);
}

TEST(Statistics, ANonFiniteValueOfOneSideIsInfiniteError) {
  for (const double bad : {kNan, kInfinity, -kInfinity}) {
    for (const auto& s : {pair({1, 2, 3}, {1, bad, 3}), pair({1, bad, 3}, {1, 2, 3})}) {
      EXPECT_EQ(s.relative_l2(), kInfinity);
      EXPECT_TRUE(std::isnan(s.cosine()));
      EXPECT_EQ(s.error_quantile(1), kInfinity);
      EXPECT_EQ(s.unmatched_nonfinite, 1);
      EXPECT_EQ(s.first_unmatched, 1);
      EXPECT_FALSE(s.relative_l2() <= 1e300);
    }
  }
  EXPECT_EQ(pair({kInfinity}, {-kInfinity}).relative_l2(), kInfinity);
}

TEST(Statistics, TheSameNonFiniteValueOnBothSidesIsCountedOnly) {
  const auto s = pair({1, kNan, kInfinity, 4}, {1, kNan, kInfinity, 4});
  EXPECT_EQ(s.relative_l2(), 0);
  EXPECT_EQ(s.reference_nonfinite, 2);
  EXPECT_EQ(s.candidate_nonfinite, 2);
  EXPECT_EQ(s.unmatched_nonfinite, 0);
}

TEST(Statistics, ExtremeMagnitudesNeitherVanishNorOverflow) {
  for (const double scale : {1e-320, 1e-200, 1e200, 1e307}) {
    const auto s = pair({3 * scale, 4 * scale}, {3 * scale, 0});
    EXPECT_NEAR(s.relative_l2(), 0.8, scale < 1e-300 ? 1e-3 : 1e-15) << scale;  // a subnormal of 1e-320 has three digits
    EXPECT_NEAR(s.norm_ratio(), 0.6, scale < 1e-300 ? 1e-3 : 1e-15) << scale;
  }
}

TEST(Statistics, FindsTheLargestErrorInALaterBlock) {
  std::vector<double> b(10'000, 1.0), a(b);
  a[7'777] = 5;
  PairStatistics s;
  accumulate(s, 1'000'000'000'000, b.data(), a.data(), 10'000);
  EXPECT_EQ(s.max_error, 4);
  EXPECT_EQ(s.max_error_index, 1'000'000'007'777);
}

TEST(Statistics, QuantilesBoundTheErrorFromAbove) {
  std::vector<double> b(1000, 0.0), a;
  for (int i = 1; i <= 1000; ++i) a.push_back(i * 1e-5);
  const auto s = pair(b, a);
  for (const double q : {0.5, 0.9, 0.99}) {
    EXPECT_GE(s.error_quantile(q), q * 1e-2);
    EXPECT_LE(s.error_quantile(q), q * 1e-2 * (1 + 1.0 / 16));
  }
  EXPECT_EQ(s.error_quantile(1), 1e-2);
}

RC_GTEST_PROP(StatisticsProperties, MergingPartsGivesTheWhole, ()) {
  const auto values = *rc::gen::container<std::vector<std::pair<double, double>>>(rc::gen::pair(any_double(), any_double()));
  const auto cut = *rc::gen::inRange<std::size_t>(0, values.size() + 1);
  std::vector<double> b, a;
  for (const auto& [x, y] : values) {
    b.push_back(x);
    a.push_back(y);
  }
  const auto n = static_cast<std::int64_t>(values.size());
  const auto c = static_cast<std::int64_t>(cut);
  PairStatistics parts, second;
  accumulate(parts, 0, b.data(), a.data(), c);
  accumulate(second, c, b.data() + c, a.data() + c, n - c);
  parts.merge(second);
  const auto whole = pair(b, a);
  RC_ASSERT(parts.elements == whole.elements);
  RC_ASSERT(parts.same_sign == whole.same_sign);
  RC_ASSERT(parts.unmatched_nonfinite == whole.unmatched_nonfinite);
  RC_ASSERT(parts.first_unmatched == whole.first_unmatched);
  RC_ASSERT(parts.reference_nonzero == whole.reference_nonzero);
  RC_ASSERT(parts.max_error == whole.max_error);
  RC_ASSERT(parts.max_error_index == whole.max_error_index);
  for (const double q : {0.5, 0.9, 0.99}) RC_ASSERT(parts.errors.quantile(q) == whole.errors.quantile(q));
  const double r = parts.relative_l2(), w = whole.relative_l2();
  RC_ASSERT(r == w || std::abs(r - w) <= sum_tolerance(values.size()) * w);
}

RC_GTEST_PROP(StatisticsProperties, AgreesWithLongDoubleOnFiniteValues, ()) {
  const auto values = *rc::gen::nonEmpty(
      rc::gen::container<std::vector<std::pair<double, double>>>(rc::gen::pair(finite_double(), finite_double())));
  std::vector<double> b, a;
  long double dd = 0, bb = 0;
  for (const auto& [x, y] : values) {
    b.push_back(x);
    a.push_back(y);
    const long double d = static_cast<long double>(y) - x;
    dd += d * d;
    bb += static_cast<long double>(x) * x;
  }
  const double wanted = dd == 0 ? 0 : bb == 0 ? kInfinity : static_cast<double>(std::sqrt(dd / bb));
  const double got = pair(b, a).relative_l2();
  RC_ASSERT(got == wanted || std::abs(got - wanted) <= sum_tolerance(values.size()) * wanted);
}

RC_GTEST_PROP(StatisticsProperties, CosineIsSymmetricBoundedAndBlindToScale, ()) {
  const auto b = *rc::gen::nonEmpty(rc::gen::container<std::vector<double>>(finite_double()));
  auto a = b;
  for (std::size_t i = 0; i < a.size(); i += 2) a[i] = -0.5 * a[i];
  const double forward = pair(b, a).cosine(), backward = pair(a, b).cosine();
  RC_ASSERT(std::abs(forward) <= 1);
  RC_ASSERT(std::abs(forward - backward) <= sum_tolerance(b.size()));
  auto doubled = a;
  for (double& v : doubled) v *= 2;
  RC_ASSERT(std::abs(pair(b, doubled).cosine() - forward) <= sum_tolerance(b.size()));
}

}  // namespace
}  // namespace longstraw::compare
