// The bounds of each dtype, at and just beyond their edge, and what a noise record adds.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "compare/judge.h"
#include "compare/report.h"
#include "tests/compare/synthetic_run.h"
#include "tests/record/sample_record.h"

namespace longstraw::compare {
namespace {

using namespace testing;
using core::record::testing::TemporaryFolder;
using ::testing::HasSubstr;

// One parameter of two elements at the given relative distance from (3, 4).
StepMeasure at_distance(double relative, const std::string& name = "w") {
  const double b[2] = {3, 4}, a[2] = {3 - 4 * relative, 4 + 3 * relative};
  StepMeasure m;
  ParameterMeasure p{name, {2}, {}};
  accumulate(p.statistics, 0, b, a, 2);
  m.whole.merge(p.statistics);
  m.parameters.push_back(p);
  return m;
}

bool passes(Dtype dtype, double relative, const CompareConfig& config = {}) {
  return judge(at_distance(relative), nullptr, Bounds(dtype, config, nullptr)).pass();
}

bool passes(Dtype dtype, double relative, double noise_of_reference, double error_of_candidate) {
  const NoiseMeasure noise{at_distance(noise_of_reference), at_distance(error_of_candidate)};
  return judge(at_distance(relative), &noise, Bounds(dtype, {}, &noise)).pass();
}

TEST(Bounds, OfTheWholeModelByDtype) {
  EXPECT_TRUE(passes(Dtype::kFloat64, 0.99e-12));
  EXPECT_FALSE(passes(Dtype::kFloat64, 1.01e-12));
  EXPECT_TRUE(passes(Dtype::kFloat32, 0.99e-5));
  EXPECT_FALSE(passes(Dtype::kFloat32, 1.01e-5));
  EXPECT_TRUE(passes(Dtype::kBfloat16, 0.06));
  EXPECT_FALSE(passes(Dtype::kBfloat16, 0.07));
}

TEST(Bounds, Float32MustAlsoStayWithinTwiceTheNoiseFloor) {
  EXPECT_TRUE(passes(Dtype::kFloat32, 1.9e-6, 1e-6, 1e-6));
  EXPECT_FALSE(passes(Dtype::kFloat32, 2.1e-6, 1e-6, 1e-6));
}

TEST(Bounds, Float32NeedNotBeNearerThanTheReferenceIsToTheTruth) {
  EXPECT_TRUE(passes(Dtype::kFloat32, 2.9e-5, 3e-5, 3e-5));
  EXPECT_FALSE(passes(Dtype::kFloat32, 3.1e-5, 3e-5, 3e-5)) << "only as far as the floor, not twice as far";
  EXPECT_FALSE(passes(Dtype::kFloat32, 2.9e-5));
}

TEST(Bounds, Bfloat16IsHeldAgainstTheReferencesOwnError) {
  EXPECT_TRUE(passes(Dtype::kBfloat16, 0.1, 0.07, 0.0769));
  EXPECT_FALSE(passes(Dtype::kBfloat16, 0.1, 0.07, 0.0771));
}

TEST(Bounds, OneParameterMayBeBeyondWhereTheWholeIsNot) {
  auto large = at_distance(0);
  large.whole.reference_squares *= 1e20L;
  auto small = at_distance(2e-10, "tiny");
  large.whole.merge(small.whole);
  large.parameters.push_back(small.parameters[0]);
  const auto judgement = judge(large, nullptr, Bounds(Dtype::kFloat64, {}, nullptr));
  EXPECT_FALSE(judgement.pass());
  EXPECT_EQ(judgement.checks.back().parameter, "tiny");
  EXPECT_TRUE(judgement.checks[2].pass);
}

TEST(Bounds, NanNeverPasses) {
  auto m = at_distance(0);
  m.whole.difference_squares = std::numeric_limits<long double>::quiet_NaN();
  EXPECT_FALSE(judge(m, nullptr, Bounds(Dtype::kFloat64, {}, nullptr)).pass());
  const double b[1] = {1}, a[1] = {std::nan("")};
  StepMeasure bad;
  ParameterMeasure p{"w", {1}, {}};
  accumulate(p.statistics, 0, b, a, 1);
  bad.whole.merge(p.statistics);
  bad.parameters.push_back(p);
  EXPECT_FALSE(judge(bad, nullptr, Bounds(Dtype::kBfloat16, {.whole_bound = 1e300, .parameter_bound = 1e300}, nullptr)).pass());
}

TEST(Bounds, NothingToCompareDoesNotPass) {
  EXPECT_FALSE(judge(StepMeasure{}, nullptr, Bounds(Dtype::kFloat32, {}, nullptr)).pass());
}

TEST(Bounds, CanBeSetByTheConfiguration) {
  EXPECT_TRUE(passes(Dtype::kFloat64, 0.1, {.whole_bound = 0.2, .parameter_bound = 0.2}));
  EXPECT_FALSE(passes(Dtype::kFloat64, 1e-13, {.whole_bound = 1e-14}));
}

TEST(Bounds, EachCheckSaysWhy) {
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBfloat16}) {
    for (const auto& check : judge(at_distance(0.5), nullptr, Bounds(dtype, {}, nullptr)).checks)
      EXPECT_FALSE(check.reason.empty());
  }
}

TEST(Bounds, TheCoarserDtypeOfTheTwoDecides) {
  const TemporaryFolder folder;
  const auto step = synthetic_step();
  const auto report =
      compare_records(write_run(folder.file("b.h5"), synthetic_header("reference", "float64"), {step}),
                      write_run(folder.file("a.h5"), synthetic_header("exact", "float32"), {step}), std::nullopt, {});
  EXPECT_EQ(report.dtype, Dtype::kFloat32);
  EXPECT_TRUE(report.pass());
  EXPECT_GT(report.steps[0].measure.whole.relative_l2(), 1e-12);
}

}  // namespace
}  // namespace longstraw::compare
