// What the reference selects, experts and keys, and how it decides between equal ones.
#include "reference/whole_sequence.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace longstraw {
namespace {

using reference::Attention;
using reference::WholeSequence;

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(at::make_generator<at::CPUGeneratorImpl>(seed)) {}
  at::Tensor normal(at::IntArrayRef shape) { return at::randn(shape, generator_, at::kDouble); }

 private:
  at::Generator generator_;
};

TEST(ReferenceChoices, OfEqualExpertsTheLowerIndexIsTaken) {
  WholeSequence execution(Attention::kTextbook, 0);
  const double never = -std::numeric_limits<double>::infinity();
  const at::Tensor scores = at::tensor({1.0, 3.0, 3.0, 3.0, 2.0,  //
                                        0.0, 0.0, 0.0, 0.0, 0.0,  //
                                        never, 1.0, never, 1.0, 2.0},
                                       at::kDouble)
                                .view({3, 5});
  EXPECT_TRUE(at::equal(execution.choose_experts(0, scores, 2), at::tensor({1, 2, 0, 1, 4, 1}, at::kLong).view({3, 2})));
  // Many equal ones: sorts and heaps that are not stable show it only beyond their small cases.
  const at::Tensor many = at::zeros({1, 4096}, at::kFloat);
  EXPECT_TRUE(at::equal(execution.choose_experts(0, many, 64), at::arange(64).unsqueeze(0)));
}

at::Tensor selection(const at::Tensor& query, const at::Tensor& key, const at::Tensor& weight, int64_t top_k) {
  WholeSequence execution(Attention::kTextbook, 0);
  execution.select_keys({.top_k = top_k}, query, key, weight);
  return execution.selection();
}

at::Tensor selection_in_loops(const at::Tensor& query, const at::Tensor& key, const at::Tensor& weight, int64_t top_k) {
  const int64_t tokens = key.size(0);
  at::Tensor selected = at::zeros({tokens, tokens}, at::kBool);
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<std::pair<double, int64_t>> scored;  // falling score, then rising index
    for (int64_t s = 0; s <= t; ++s) {
      double score = 0.0;
      for (int64_t h = 0; h < query.size(1); ++h) {
        score += weight[t][h].item<double>() * std::max(0.0, query[t][h].dot(key[s]).item<double>());
      }
      scored.emplace_back(-score, s);
    }
    std::sort(scored.begin(), scored.end());
    for (int64_t i = 0; i < std::min(top_k, t + 1); ++i) selected[t][scored[size_t(i)].second] = true;
  }
  return selected;
}

TEST(ReferenceChoices, SelectedKeysAreTheLargestVisibleScores) {
  Random random(7);
  for (const int64_t top_k : {1, 2, 5, 11, 12, 40}) {
    const at::Tensor query = random.normal({12, 16, 4}), key = random.normal({12, 4}), weight = random.normal({12, 16});
    const at::Tensor selected = selection(query, key, weight, top_k);
    EXPECT_TRUE(at::equal(selected, selection_in_loops(query, key, weight, top_k))) << top_k;
    for (int64_t t = 0; t < 12; ++t) EXPECT_EQ(selected[t].sum().item<int64_t>(), std::min(top_k, t + 1));
  }
}

TEST(ReferenceChoices, OfEqualKeysTheEarlierIsTaken) {
  Random random(7);
  // Whole numbers: sums are exact in any order, so equal scores are equal. Two heads only, so that many rows are all zero.
  const at::Tensor query = random.normal({40, 2, 2}).round(), key = random.normal({40, 2}).round();
  const at::Tensor weight = random.normal({40, 2}).round();
  for (const int64_t top_k : {1, 3, 8}) {
    EXPECT_TRUE(at::equal(selection(query, key, weight, top_k), selection_in_loops(query, key, weight, top_k))) << top_k;
  }
  const at::Tensor nothing = selection(query, at::zeros_like(key), weight, 3);
  EXPECT_TRUE(at::equal(nothing, (at::arange(40).unsqueeze(0) < 3).logical_and(at::ones({40, 40}, at::kBool).tril())));
}

TEST(ReferenceChoices, ManyKeysAreNoChoice) {
  Random random(9);
  const at::Tensor selected = selection(random.normal({6, 2, 3}), random.normal({6, 3}), random.normal({6, 2}), 2048);
  EXPECT_TRUE(at::equal(selected, at::ones({6, 6}, at::kBool).tril()));
}

}  // namespace
}  // namespace longstraw
