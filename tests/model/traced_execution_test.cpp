// A trace's numbers are those that docs/record.md describes, and operations get and give what they do without one.
#include "core/model/traced_execution.h"

#include "tests/model/plain_execution.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace longstraw::core::model {
namespace {

uint64_t splitmix64(uint64_t z) {
  z += 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

double projection(const at::Tensor& row) {
  const at::Tensor flat = row.flatten().to(at::kDouble);
  double sum = 0.0;
  for (int64_t i = 0; i < flat.numel(); ++i) {
    sum += (std::ldexp(double(splitmix64(uint64_t(i)) >> 11), -52) - 1.0) * flat[i].item<double>();
  }
  return sum;
}

double hash(const std::vector<int64_t>& chosen) {
  uint64_t sum = 0;
  for (const int64_t n : chosen) sum += splitmix64(uint64_t(n) * 0x9e3779b97f4a7c15ULL);
  return double(sum & ((uint64_t{1} << 53) - 1));
}

TEST(TracedExecution, PutsDownAProjectionOfEachTracedRowOfWhatIsComputed) {
  // Wide enough that rows are taken a few at a time.
  const Parameter weight{.name = "w", .shape = {70000, 3}, .value = at::randn({70000, 3}, at::kFloat)};
  const at::Tensor x_SI = at::randn({6, 3}, at::kFloat);
  PlainExecution plain;
  TracePoints points;
  TracedExecution traced(plain, points, 1, 4);
  const at::Tensor y_SO = traced.linear(x_SI, weight, nullptr);
  EXPECT_TRUE(at::equal(y_SO, plain.linear(x_SI, weight, nullptr)));
  const at::Tensor heads_Shd = y_SO.narrow(-1, 0, 12).view({6, 2, 6});
  traced.add(heads_Shd, 2.0 * heads_Shd);
  const Trace trace = points.trace(0, 4);
  ASSERT_EQ(trace.size(), 2u);
  for (int64_t row = 0; row < 4; ++row) {
    const double scale = y_SO[row + 1].norm().item<double>() * std::sqrt(70000.0);
    EXPECT_NEAR(trace.at("0000.linear")[row], projection(y_SO[row + 1]), 70000 * 1.2e-16 * scale);
    // Of what is added, what is added.
    EXPECT_NEAR(trace.at("0001.add")[row], 2.0 * projection(heads_Shd[row + 1]), 12 * 2 * 1.2e-16 * scale);
  }
  EXPECT_EQ(points.trace(2, 1).at("0000.linear"), std::vector<double>{trace.at("0000.linear")[2]});
}

TEST(TracedExecution, ChoicesAreHashedAsSets) {
  PlainExecution plain;
  TracePoints points;
  TracedExecution traced(plain, points, 0, 3);
  const at::Tensor scores_SE = at::tensor({5.0, 1.0, 9.0, 0.0, 9.0, 1.0, 5.0, 0.0, 5.0, 9.0, 1.0, 0.0}).view({3, 4});
  const at::Tensor chosen_Sk = traced.choose_experts(0, scores_SE, 2);
  const Trace trace = points.trace(0, 3);
  const auto& numbers = trace.at("0000.experts");
  EXPECT_EQ(numbers[0], hash({2, 0}));
  EXPECT_EQ(numbers[1], numbers[0]);  // the same experts in another order
  EXPECT_EQ(numbers[2], hash({0, 1}));
  EXPECT_NE(numbers[2], numbers[0]);
}

TEST(TracedExecution, TracesNarrowedRowsFromTheFirst) {
  PlainExecution plain;
  TracePoints points;
  TracedExecution traced(plain, points, 4, 2);
  const at::Tensor x_SD = at::randn({6, 5}, at::kDouble);
  traced.swiglu(x_SD, x_SD);
  traced.rows_are_narrowed();
  traced.swiglu(x_SD.narrow(0, 4, 2), x_SD.narrow(0, 4, 2));
  const Trace trace = points.trace(0, 2);
  EXPECT_EQ(trace.at("0000.swiglu"), trace.at("0001.swiglu"));
}

}  // namespace
}  // namespace longstraw::core::model
