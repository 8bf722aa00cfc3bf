// A step of two records: every parameter is in exactly its layer, its kind and the whole; what does not match is named.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "compare/measure.h"
#include "core/record/sketch.h"
#include "core/record/writer.h"
#include "tests/compare/synthetic_run.h"
#include "tests/record/sample_record.h"

namespace longstraw::compare {
namespace {

using namespace testing;
using core::record::RecordReader;
using core::record::testing::TemporaryFolder;
using ::testing::ElementsAre;

StepMeasure measure(const TemporaryFolder& folder, const SyntheticStep& reference, const SyntheticStep& candidate) {
  const RecordReader b(write_run(folder.file("b.h5"), synthetic_header("reference", "float64"), {reference}));
  const RecordReader a(write_run(folder.file("a.h5"), synthetic_header("exact", "float64"), {candidate}));
  return measure_step(b, a, 0);
}

TEST(Measure, ARecordIsAtNoDistanceFromItself) {
  const TemporaryFolder folder;
  const auto step = synthetic_step();
  const auto m = measure(folder, step, step);
  EXPECT_EQ(m.parameters.size(), step.gradients.size());
  EXPECT_TRUE(m.same_parameters());
  EXPECT_EQ(m.whole.relative_l2(), 0);
  EXPECT_NEAR(m.whole.cosine(), 1, 1e-15);
  EXPECT_EQ(m.whole.sign_agreement(), 1);
  EXPECT_EQ(m.whole.max_error, 0);
}

TEST(Measure, LayersKindsAndTheRestMakeTheWhole) {
  const TemporaryFolder folder;
  const auto reference = synthetic_step();
  auto candidate = reference;
  add_rounding(candidate, 1e-3, 5);
  const auto m = measure(folder, reference, candidate);
  EXPECT_EQ(m.by_layer.size(), 4U);
  std::int64_t kinds = 0, layers = 0, outside = 0;
  long double squares = 0;
  for (const auto& [kind, s] : m.by_kind) {
    kinds += s.elements;
    squares += s.difference_squares;
  }
  for (const auto& [layer, s] : m.by_layer) layers += s.elements;
  for (const char* name : {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"})
    outside += m.find(name)->statistics.elements;
  EXPECT_EQ(kinds, m.whole.elements);
  EXPECT_EQ(layers + outside, m.whole.elements);
  EXPECT_NEAR(static_cast<double>(squares / m.whole.difference_squares), 1, 1e-15);
}

TEST(Measure, ADeviationStaysInItsLayerAndKind) {
  const TemporaryFolder folder;
  const auto reference = synthetic_step();
  auto candidate = reference;
  const std::string name = "model.layers.2.mlp.up_proj.weight";
  candidate.gradients[name].values[31] += 0.5;
  const auto m = measure(folder, reference, candidate);
  EXPECT_EQ(m.whole.max_error_parameter, name);
  EXPECT_EQ(m.whole.max_error_index, 31);
  EXPECT_EQ(m.worst()->name, name);
  for (const auto& [layer, s] : m.by_layer) EXPECT_EQ(s.relative_l2() > 0, layer == 2) << layer;
  for (const auto& [kind, s] : m.by_kind) EXPECT_EQ(s.relative_l2() > 0, kind == "mlp.up_proj.weight") << kind;
}

TEST(Measure, NamesWhatIsOnOneSideOnly) {
  const TemporaryFolder folder;
  const auto reference = synthetic_step();
  auto candidate = reference;
  candidate.gradients.erase("model.norm.weight");
  candidate.gradients["extra.weight"] = {{2}, {1, 2}};
  candidate.gradients["lm_head.weight"] = {{2}, {1, 2}};
  const auto m = measure(folder, reference, candidate);
  EXPECT_THAT(m.only_in_reference, ElementsAre("model.norm.weight"));
  EXPECT_THAT(m.only_in_candidate, ElementsAre("extra.weight"));
  ASSERT_EQ(m.shapes.size(), 1U);
  EXPECT_EQ(m.shapes[0].name, "lm_head.weight");
  EXPECT_FALSE(m.same_parameters());
}

TEST(Measure, SketchesEstimateWhereAGradientIsAbsent) {
  const TemporaryFolder folder;
  auto reference = synthetic_step();
  auto candidate = reference;
  add_rounding(candidate, 1e-2, 7);
  const std::string name = "model.layers.0.mlp.up_proj.weight";
  const auto exact = measure(folder, reference, candidate).find(name)->statistics;
  const auto write = [&](const std::string& file, const SyntheticStep& run, const char* arm) {
    core::record::RecordWriter writer(folder.file(file), synthetic_header(arm, "float64"));
    auto step = writer.begin_step(0);
    const auto& g = run.gradients.at(name);
    core::record::Sketcher sketcher(name, g.shape, 11);
    sketcher.add(0, g.values.data(), static_cast<std::int64_t>(g.values.size()));
    step.sketch(name, sketcher.result());
    step.memory({{"peak_bytes", 1}});
    step.timing({{"total", 1}});
    step.commit();
    writer.close();
    return RecordReader(folder.file(file));
  };
  const auto b = write("sb.h5", reference, "reference");
  const auto a = write("sa.h5", candidate, "exact");
  const auto m = measure_step(b, a, 0);
  ASSERT_EQ(m.parameters.size(), 1U);
  const auto& s = m.parameters[0].statistics;
  EXPECT_TRUE(s.estimated);
  EXPECT_NEAR(s.norm_ratio(), exact.norm_ratio(), 1e-12);
  const double share = 5 * std::sqrt(2.0 / core::record::kSketchBuckets);  // five standard deviations of a squared norm
  EXPECT_NEAR(s.relative_l2(), exact.relative_l2(), share * exact.relative_l2());
  EXPECT_NEAR(s.cosine(), exact.cosine(), share);
  EXPECT_TRUE(std::isnan(s.sign_agreement()));
}

}  // namespace
}  // namespace longstraw::compare
