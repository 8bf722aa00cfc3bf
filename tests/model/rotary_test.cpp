// The rotary tables of each scaling. Whole tables are held against transformers by the golden values of the variants
// (the gradients of llama3, yarn, longrope, … would be wrong otherwise); here are the formulas' own landmarks, and what
// a batch must not mix.
#include "core/model/rotary.h"

#include "core/base/errors.h"
#include "tests/model/plain_execution.h"
#include "tests/support/closeness.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace longstraw::core::model {
namespace {

using testing::HasSubstr;

Rotary rotary(RotaryType type, double factor = 1.0) {
  Rotary r;
  r.type = type;
  r.dims = 16;
  r.max_positions = 256;
  r.original_max_positions = 64;
  r.factor = factor;
  return r;
}

std::vector<double> frequencies(const Rotary& r, SequenceLengths lengths = {10, 20}) {
  const at::Tensor f = rotary_frequencies(r, lengths, at::kDouble).inverse_f;
  return {f.data_ptr<double>(), f.data_ptr<double>() + f.numel()};
}

double plain(int i) { return std::pow(10000.0, -2.0 * i / 16); }

TEST(Rotary, DefaultFrequenciesAreAGeometricSeries) {
  const auto f = frequencies(rotary(RotaryType::kDefault));
  ASSERT_EQ(f.size(), 8u);
  for (int i = 0; i < 8; ++i) EXPECT_NEAR(f[size_t(i)], plain(i), 4e-16 * plain(i) * 4);
}

TEST(Rotary, LinearDividesEveryFrequency) {
  const auto f = frequencies(rotary(RotaryType::kLinear, 4.0));
  for (int i = 0; i < 8; ++i) EXPECT_NEAR(f[size_t(i)], plain(i) / 4, 1e-15 * plain(i));
}

TEST(Rotary, Llama3KeepsShortWavesAndDividesLongOnes) {
  const auto f = frequencies(rotary(RotaryType::kLlama3, 8.0));
  for (int i = 0; i < 8; ++i) {
    const double wavelength = 2 * std::numbers::pi / plain(i);
    if (wavelength < 64.0 / 4) EXPECT_NEAR(f[size_t(i)], plain(i), 1e-15 * plain(i));
    else if (wavelength > 64.0) EXPECT_NEAR(f[size_t(i)], plain(i) / 8, 1e-15 * plain(i));
    else EXPECT_TRUE(f[size_t(i)] < plain(i) && f[size_t(i)] > plain(i) / 8);
  }
  EXPECT_LT(2 * std::numbers::pi / plain(0), 16.0);  // all three cases occur
  EXPECT_GT(2 * std::numbers::pi / plain(7), 64.0);
}

TEST(Rotary, YarnKeepsTheFirstAndDividesTheLastFrequencies) {
  Rotary r = rotary(RotaryType::kYarn, 4.0);
  const auto f = frequencies(r);
  EXPECT_NEAR(f.front(), 1.0, 1e-15);
  EXPECT_NEAR(f.back(), plain(7) / 4, 1e-15);
  EXPECT_NEAR(rotary_frequencies(r, {1, 2}, at::kDouble).attention_factor, 0.1 * std::log(4.0) + 1, 1e-15);
  r.mscale = 1.0;
  r.mscale_all_dim = 0.8;
  EXPECT_NEAR(rotary_frequencies(r, {1, 2}, at::kDouble).attention_factor, (0.1 * std::log(4.0) + 1) / (0.08 * std::log(4.0) + 1),
              1e-15);
  r.attention_factor = 1.25;
  EXPECT_EQ(rotary_frequencies(r, {1, 2}, at::kDouble).attention_factor, 1.25);
  r.truncate = false;
  EXPECT_NE(frequencies(r), f);
}

TEST(Rotary, DynamicIsPlainUntilTheModelsLength) {
  const Rotary r = rotary(RotaryType::kDynamic, 2.0);
  EXPECT_EQ(frequencies(r, {3, 256}), frequencies(rotary(RotaryType::kDefault)));
  const auto longer = frequencies(r, {512, 512});
  const double theta = 10000.0 * std::pow(2.0 * 512 / 256 - 1, 16.0 / 14);
  for (int i = 0; i < 8; ++i) EXPECT_NEAR(longer[size_t(i)], std::pow(theta, -2.0 * i / 16), 1e-14 * longer[size_t(i)]);
}

TEST(Rotary, ABatchThatAsksForTwoTablesIsRefused) {
  const auto refused = [](const Rotary& r, SequenceLengths lengths) {
    try {
      rotary_frequencies(r, lengths, at::kFloat);
      return false;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr(name_of(r.type)));
      EXPECT_THAT(error.what(), HasSubstr(std::to_string(lengths.longest)));
      return true;
    }
  };
  const Rotary dynamic = rotary(RotaryType::kDynamic, 2.0);
  EXPECT_FALSE(refused(dynamic, {10, 256}));
  EXPECT_TRUE(refused(dynamic, {10, 257}));
  EXPECT_TRUE(refused(dynamic, {300, 301}));
  EXPECT_FALSE(refused(dynamic, {300, 300}));

  Rotary longrope = rotary(RotaryType::kLongrope, 4.0);
  longrope.short_factor.assign(8, 1.0);
  longrope.long_factor.assign(8, 3.0);
  EXPECT_FALSE(refused(longrope, {10, 64}));
  EXPECT_TRUE(refused(longrope, {64, 65}));
  EXPECT_FALSE(refused(longrope, {65, 400}));
  EXPECT_NEAR(frequencies(longrope, {65, 400})[2], plain(2) / 3, 1e-16);
  EXPECT_NEAR(frequencies(longrope, {10, 64})[2], plain(2), 1e-16 * 2);
  EXPECT_NEAR(rotary_frequencies(longrope, {1, 2}, at::kDouble).attention_factor, std::sqrt(1 + std::log(4.0) / std::log(64.0)),
              1e-15);
}

TEST(Rotary, AFloat64ModelHasFloat64Angles) {
  const Rotary r = rotary(RotaryType::kDefault);
  const at::Tensor positions = at::tensor({int64_t(0), int64_t(1), int64_t(2'000'000)}, at::kLong);
  const auto exact = rotary_table(rotary_frequencies(r, {1, 2}, at::kDouble), positions, at::kDouble);
  for (int i = 0; i < 8; ++i) {
    const double angle = 2e6 * plain(i);
    // The angle itself is rounded to 2e6 · 1.1e-16 · a few.
    EXPECT_NEAR(exact.cos_Sr[2][i].item<double>(), std::cos(angle), 2e-9);
    EXPECT_NEAR(exact.sin_Sr[2][i + 8].item<double>(), std::sin(angle), 2e-9);
  }
  const auto single = rotary_table(rotary_frequencies(r, {1, 2}, at::kFloat), positions, at::kFloat);
  EXPECT_EQ(single.cos_Sr.scalar_type(), at::kFloat);
  const double off = (single.cos_Sr.to(at::kDouble) - exact.cos_Sr).abs().max().item<double>();
  EXPECT_GT(off, 1e-6) << "float32 angles at two million positions are visibly rounded";
  const auto bfloat16 = rotary_table(rotary_frequencies(r, {1, 2}, at::kBFloat16), positions, at::kBFloat16);
  EXPECT_TRUE(at::equal(bfloat16.cos_Sr, single.cos_Sr.to(at::kBFloat16))) << "angles of bfloat16 models are float32";
}

TEST(Execution, RotationKeepsLengthAndDependsOnTheDifferenceOfPositionsAlone) {
  PlainExecution execution;
  const auto f = rotary_frequencies(rotary(RotaryType::kDefault), {1, 2}, at::kDouble);
  const at::Tensor x = at::randn({2, 1, 20}, at::kDouble);  // 20 dimensions: the last 4 pass
  const auto at_positions = [&](int64_t a, int64_t b) {
    return execution.rotate(x, rotary_table(f, at::tensor({a, b}, at::kLong), at::kDouble));
  };
  const at::Tensor near = at_positions(3, 7), far = at_positions(103, 107);
  EXPECT_LE(test::relative_l2(near.norm(2, {-1}), x.norm(2, {-1})), 1e-15);
  const double near_product = (near[0] * near[1]).sum().item<double>(), far_product = (far[0] * far[1]).sum().item<double>();
  EXPECT_NEAR(near_product, far_product, 1e-12);
  EXPECT_GT(std::abs(near_product - (x[0] * x[1]).sum().item<double>()), 1e-3);
  EXPECT_TRUE(at::equal(near.narrow(-1, 16, 4), x.narrow(-1, 16, 4)));
}

}  // namespace
}  // namespace longstraw::core::model
