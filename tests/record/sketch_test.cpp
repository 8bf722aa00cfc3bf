// Sketches estimate inner products and distances within their stated error, and do not depend on how the data is split.

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <random>

#include "core/base/errors.h"
#include "core/record/reader.h"
#include "core/record/sketch.h"
#include "core/record/writer.h"
#include "tests/record/sample_record.h"

namespace longstraw::core::record {
namespace {

std::vector<double> normal_values(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(count);
  for (double& v : values) v = normal(generator);
  return values;
}

Sketch sketch_of(const std::string& name, const std::vector<double>& values, std::uint64_t seed,
                 std::int64_t buckets = kSketchBuckets) {
  Sketcher sketcher(name, {static_cast<std::int64_t>(values.size())}, seed, buckets);
  sketcher.add(0, values.data(), static_cast<std::int64_t>(values.size()));
  return sketcher.result();
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

TEST(Sketch, InnerProductsAreUnbiasedWithinTheStatedDeviation) {
  const auto a = normal_values(20'000, 1);
  auto b = normal_values(20'000, 2);
  for (std::size_t i = 0; i < b.size(); ++i) b[i] += 0.5 * a[i];
  constexpr std::int64_t kBuckets = 1024;
  constexpr int kTrials = 200;
  const double scale = std::sqrt(dot(a, a) * dot(b, b));
  double mean = 0, square = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    const double error =
        (inner_product(sketch_of("w", a, trial, kBuckets), sketch_of("w", b, trial, kBuckets)) - dot(a, b)) / scale;
    mean += error / kTrials;
    square += error * error / kTrials;
  }
  const double deviation = std::sqrt(2.0 / kBuckets);
  EXPECT_LE(std::abs(mean), 4 * deviation / std::sqrt(kTrials));  // four standard errors of a mean of kTrials
  EXPECT_LE(std::sqrt(square), 1.25 * deviation);                 // its own sampling error is 1/sqrt(2 kTrials) = 5 %
  EXPECT_GE(std::sqrt(square), 0.25 * deviation);                 // a projection that is no projection would be exact
}

TEST(Sketch, DistanceIsRelativeToTheDistanceNotToTheNorms) {
  const auto a = normal_values(50'000, 3);
  auto b = a;
  const auto noise = normal_values(50'000, 4);
  for (std::size_t i = 0; i < b.size(); ++i) b[i] += 1e-6 * noise[i];
  const double wanted = 1e-6 * std::sqrt(dot(noise, noise));
  // Var |Sx|^2 <= 2/d |x|^4, so |Sx| is within 5 * sqrt(2/d)/2 of |x|.
  EXPECT_NEAR(distance(sketch_of("w", a, 1), sketch_of("w", b, 1)), wanted, wanted * 2.5 * std::sqrt(2.0 / kSketchBuckets));
}

RC_GTEST_PROP(Sketch, DoesNotDependOnTheSplitIntoBlocks, (std::uint64_t seed)) {
  const auto count = *rc::gen::inRange<std::int64_t>(1, 3000);
  const auto cut = *rc::gen::inRange<std::int64_t>(0, count + 1);
  std::vector<double> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(static_cast<int>(i * 37 % 101) - 50);
  Sketcher parts("w", {count}, seed);
  parts.add(0, values.data(), cut);
  parts.add(cut, values.data() + cut, count - cut);
  RC_ASSERT(parts.result() == sketch_of("w", values, seed));  // small whole numbers add exactly
}

TEST(Sketch, DependsOnSeedAndName) {
  const auto a = normal_values(1000, 5);
  EXPECT_NE(sketch_of("w", a, 1).buckets, sketch_of("w", a, 2).buckets);
  EXPECT_NE(sketch_of("w", a, 1).buckets, sketch_of("v", a, 1).buckets);
  EXPECT_THROW(inner_product(sketch_of("w", a, 1), sketch_of("w", a, 2)), ConfigError);
}

TEST(Sketch, IsTheSameOnEveryMachine) {
  // Bucket and sign of the first elements, computed once with an independent implementation in Python (xxhash, splitmix64).
  const std::vector<double> one{1, 2, 4};
  const auto sketch = sketch_of("model.norm.weight", one, 42, 8);
  EXPECT_EQ(sketch.buckets, (std::vector<double>{0, -2, -4, 0, 0, 0, 0, 1}));
}

TEST(Sketch, CountsNonFiniteElementsApart) {
  const auto sketch = sketch_of("w", {3, NAN, 4, INFINITY}, 1);
  EXPECT_EQ(sketch.nonfinite, 2);
  EXPECT_EQ(sketch.norm(), 5);
}

TEST(Sketch, ReadsBackFromARecord) {
  const testing::TemporaryFolder folder;
  const auto sketch = sketch_of("w", normal_values(100, 6), 9);
  RecordWriter writer(folder.file("r.h5"), testing::sample_header());
  auto step = writer.begin_step(0);
  step.sketch("w", sketch);
  step.memory({{"peak_bytes", 1}});
  step.timing({{"total", 1}});
  step.commit();
  writer.close();
  const RecordReader record(folder.file("r.h5"));
  EXPECT_EQ(record.sketch_names(0), std::vector<std::string>{"w"});
  EXPECT_EQ(record.sketch(0, "w"), sketch);
  EXPECT_TRUE(record.gradients(0).empty());
}

}  // namespace
}  // namespace longstraw::core::record
