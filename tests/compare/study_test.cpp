// A cell's rows are what the formulas say, for each layer and kind; the tables show them.

#include "compare/study.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "compare/statistics.h"
#include "core/base/errors.h"

namespace longstraw::compare {
namespace {

using core::record::find_row;
using core::record::StudyCell;
using core::record::StudyRow;
using core::record::StudyScope;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Values = std::vector<double>;

StudyMeasurement sample() {
  StudyMeasurement m;
  m.add("model.layers.0.self_attn.q_proj.weight", Values{3, 4}, Values{3, 4});
  m.add("model.layers.1.self_attn.q_proj.weight", Values{0, 0, 12}, Values{0, 5, 0});
  m.add("model.layers.1.mlp.experts.0.up_proj.weight", Values{1, 2}, Values{-1, 2});
  m.add("model.layers.1.mlp.experts.7.up_proj.weight", Values{2}, Values{2});
  m.add("lm_head.weight", Values{6}, Values{3});
  return m;
}

StudyCell cell_of(const StudyMeasurement& m) {
  return {.key = {.family = "llama",
                  .model = "tiny",
                  .arm = "detached",
                  .dtype = "float64",
                  .prompt_tokens = 64,
                  .group_size = 2,
                  .response_tokens = 8},
          .inputs = {},
          .git_commit = {},
          .numbers = {},
          .rows = m.rows()};
}

const StudyRow& row(const StudyCell& cell, StudyScope scope, std::int64_t layer, const std::string& kind) {
  const auto* found = find_row(cell, scope, layer, kind);
  if (found == nullptr) throw std::runtime_error("no row " + kind);
  return *found;
}

TEST(StudyMeasurement, GroupsByLayerAndKind) {
  const auto cell = cell_of(sample());
  // Whole; layers 0 and 1; three kinds; two in layer 1, one in layer 0, one outside.
  ASSERT_EQ(cell.rows.size(), 1u + 2 + 3 + 4);
  EXPECT_EQ(row(cell, StudyScope::kWhole, -1, "").elements, 9);
  EXPECT_EQ(row(cell, StudyScope::kLayer, 1, "").elements, 6);
  EXPECT_EQ(row(cell, StudyScope::kKind, -1, "self_attn.q_proj.weight").elements, 5);
  EXPECT_EQ(row(cell, StudyScope::kKind, -1, "mlp.experts.up_proj.weight").elements, 3);
  EXPECT_EQ(row(cell, StudyScope::kLayerAndKind, -1, "lm_head.weight").elements, 1);
  EXPECT_EQ(find_row(cell, StudyScope::kLayer, -1), nullptr);
}

TEST(StudyMeasurement, ComputesTheFormulas) {
  const auto cell = cell_of(sample());
  const auto& same = row(cell, StudyScope::kLayer, 0, "");
  EXPECT_EQ(same.relative_l2, 0);
  EXPECT_DOUBLE_EQ(same.cosine, 1);
  EXPECT_DOUBLE_EQ(same.sign_cosine, 1);
  const auto& orthogonal = row(cell, StudyScope::kLayerAndKind, 1, "self_attn.q_proj.weight");
  EXPECT_DOUBLE_EQ(orthogonal.difference_norm, 13);
  EXPECT_DOUBLE_EQ(orthogonal.relative_l2, 13.0 / 12);
  EXPECT_DOUBLE_EQ(orthogonal.norm_ratio, 5.0 / 12);
  EXPECT_EQ(orthogonal.cosine, 0);
  EXPECT_EQ(orthogonal.update_cosine, 0);
  EXPECT_EQ(orthogonal.sign_cosine, 0);
  EXPECT_DOUBLE_EQ(orthogonal.sign_agreement, 1.0 / 3);
  const auto& experts = row(cell, StudyScope::kKind, -1, "mlp.experts.up_proj.weight");
  EXPECT_DOUBLE_EQ(experts.cosine, (-1 + 4 + 4) / 9.0);
  EXPECT_DOUBLE_EQ(experts.sign_cosine, 1.0 / 3);  // two agree, one opposes
  EXPECT_NEAR(experts.update_cosine, 1.0 / 3, 2e-8);
  const auto& head = row(cell, StudyScope::kKind, -1, "lm_head.weight");
  EXPECT_DOUBLE_EQ(head.relative_l2, 0.5);
  EXPECT_DOUBLE_EQ(head.update_cosine, 1);  // the length does not matter to AdamW's first step
  const auto& whole = row(cell, StudyScope::kWhole, -1, "");
  const double b = 25 + 144 + 5 + 4 + 36, a = 25 + 25 + 5 + 4 + 9, dot = 25 + 0 + 3 + 4 + 18;
  EXPECT_DOUBLE_EQ(whole.reference_norm, std::sqrt(b));
  EXPECT_DOUBLE_EQ(whole.candidate_norm, std::sqrt(a));
  EXPECT_DOUBLE_EQ(whole.cosine, dot / std::sqrt(a * b));
  EXPECT_DOUBLE_EQ(whole.difference_norm, std::sqrt(a + b - 2 * dot));
  // Non-zero elements: 7 and 7; of those that both have, 5 agree and 1 opposes.
  EXPECT_DOUBLE_EQ(whole.sign_cosine, 4.0 / 7);
}

TEST(StudyMeasurement, TakesFloatsAsTheyAreAndLongParametersInBlocks) {
  std::vector<float> b(100001), a(b.size());
  Values wide_b, wide_a;
  for (std::size_t i = 0; i < b.size(); ++i) {
    b[i] = static_cast<float>(std::sin(0.1 * static_cast<double>(i)));
    a[i] = static_cast<float>(std::sin(0.1 * static_cast<double>(i) + 0.3));
    wide_b.push_back(b[i]);
    wide_a.push_back(a[i]);
  }
  StudyMeasurement narrow, wide;
  narrow.add("lm_head.weight", b, a);
  wide.add("lm_head.weight", wide_b, wide_a);
  EXPECT_EQ(narrow.rows(), wide.rows());
  PairStatistics whole;
  accumulate(whole, 0, wide_b.data(), wide_a.data(), static_cast<std::int64_t>(b.size()));
  EXPECT_DOUBLE_EQ(narrow.rows()[0].relative_l2, whole.relative_l2());
  EXPECT_DOUBLE_EQ(narrow.rows()[0].update_cosine, whole.update_cosine());
  EXPECT_EQ(narrow.rows()[0].sign_agreement, whole.sign_agreement());
}

TEST(StudyMeasurement, ANaNIsAnInfiniteDeviation) {
  StudyMeasurement m;
  m.add("lm_head.weight", Values{1, 2}, Values{1, std::nan("")});
  const auto whole = m.rows()[0];
  EXPECT_EQ(whole.relative_l2, std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(whole.cosine));
  EXPECT_TRUE(std::isnan(whole.sign_cosine));
}

TEST(StudyMeasurement, RefusesUnequalSizesAndAParameterTwice) {
  StudyMeasurement m;
  m.add("lm_head.weight", Values{1}, Values{1});
  EXPECT_THROW(m.add("lm_head.weight", Values{1}, Values{1}), ConfigError);
  EXPECT_THROW(m.add("model.norm.weight", Values{1, 2}, Values{1}), ConfigError);
}

TEST(StudyTable, SaysOnceWhatAllCellsShare) {
  auto first = cell_of(sample()), second = first;
  second.key.prompt_tokens = 16;
  const auto text = study_table({first, second});
  EXPECT_THAT(text, HasSubstr("family llama, model tiny, dtype float64, group 2, response 8, seed 0, tail 0, arm detached\n\n"));
  EXPECT_THAT(text, HasSubstr("prompt  cosine  relative L2"));
  EXPECT_LT(text.find("\n    16"), text.find("\n    64"));
}

TEST(StudyTable, IsMarkdownOnDemand) {
  const auto text = study_table({cell_of(sample())}, TableStyle::kMarkdown);
  EXPECT_THAT(text, AllOf(HasSubstr("| family |"), HasSubstr("|-----:|"), HasSubstr("| llama  |")));
  EXPECT_THAT(text, Not(HasSubstr("||")));
}

TEST(StudyTable, ASmallDeviationIsNotPrintedAsNone) {
  StudyMeasurement m;
  m.add("lm_head.weight", Values{1, 1}, Values{1, 1 + 3e-12});
  EXPECT_THAT(study_table({cell_of(m)}), HasSubstr("2.1e-12"));
}

TEST(StudyTable, BreaksDownByKindWithSharesOfWhatIsLost) {
  const auto cell = cell_of(sample());
  const auto text = study_breakdown(cell, StudyScope::kKind);
  EXPECT_THAT(text, HasSubstr("self_attn.q_proj.weight"));
  EXPECT_THAT(text, HasSubstr("0.9286"));  // 169 of the 182 squared that are lost
  EXPECT_THAT(study_breakdown(cell, StudyScope::kLayer), Not(HasSubstr("q_proj")));
  EXPECT_THROW(study_breakdown(cell, StudyScope::kWhole), ConfigError);
}

TEST(StudyTable, HasNothingToSayAboutNoCells) { EXPECT_EQ(study_table({}), "no cells\n"); }

}  // namespace
}  // namespace longstraw::compare
