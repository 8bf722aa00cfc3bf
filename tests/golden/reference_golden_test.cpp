// The reference against Hugging Face transformers on every variant of fixtures/golden.
#include "reference/gradient.h"
#include "reference/whole_sequence.h"
#include "tests/support/closeness.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

namespace longstraw {
namespace {

using reference::Attention;
using reference::RunOptions;
using test::Golden;

// Both sides compute in float64 with the same formulas; DESIGN's bound leaves room for the order of summation.
constexpr double kFloat64 = 1e-10;

std::vector<at::Tensor> golden_gradient(const core::model::Decoder& decoder, const Golden& golden, const std::string& prefix) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : decoder.parameters()) gradients.push_back(golden[prefix + parameter->name]);
  return gradients;
}

// Every tensor of the file under `prefix` belongs to a parameter of ours: none is left out of the comparison.
int64_t count_under(const Golden& golden, const std::string& prefix) {
  return std::count_if(golden.tensors.begin(), golden.tensors.end(),
                       [&](const auto& entry) { return entry.first.starts_with(prefix); });
}

class ReferenceGolden : public testing::TestWithParam<std::string> {
 protected:
  // `rounded`: transformers' own gradient in the decoder's dtype. Of a parameter whose gradient is a sum that cancels, no
  // rounding in that dtype leaves more than its own error shows: up to twice that is allowed where it is beyond the bound.
  void expect_gradient(const core::model::Decoder& decoder, const Golden& golden, const std::string& prefix,
                       const RunOptions& options, double bound, const Golden* rounded = nullptr) {
    const auto step = reference::weighted_gradient(decoder, golden.batch, golden.weights, options);
    ASSERT_EQ(count_under(golden, prefix), int64_t(decoder.parameters().size()));
    const auto error = test::gradient_error(decoder, step.gradients, golden_gradient(decoder, golden, prefix), 1e-6);
    EXPECT_LE(error.whole, bound) << prefix;
    double whole_norm = 0.0;
    for (const auto& wanted : golden_gradient(decoder, golden, prefix))
      whole_norm = std::hypot(whole_norm, wanted.norm().item<double>());
    for (size_t i = 0; i < step.gradients.size(); ++i) {
      const std::string name = prefix + decoder.parameters()[i]->name;
      const at::Tensor& wanted = golden[name];
      const double norm = wanted.norm().item<double>();
      if (norm == 0) {  // an indexer's, or that of an expert which no token chose
        EXPECT_EQ(step.gradients[i].abs().max().item<double>(), 0.0) << name;
      } else if (norm > 1e-6 * whole_norm) {
        const double allowed = rounded ? std::max(bound, 2 * test::relative_l2((*rounded)[name], wanted)) : bound;
        EXPECT_LE(test::relative_l2(step.gradients[i], wanted), allowed) << name;
      }
    }
    printf("    %-22s %-18s relative L2 %.2e, worst parameter %.2e %s\n", GetParam().c_str(), prefix.c_str(), error.whole,
           error.worst, error.worst_parameter.c_str());
    if (!golden.has("full.loss") || prefix != "full.grad.") return;
    EXPECT_LE(test::relative_l2(at::scalar_tensor(step.loss, at::kDouble), golden["full.loss"]), bound * 10) << "loss";
    for (size_t g = 0; g < step.logprobs[0].size(); ++g) {
      const auto& row = step.logprobs[0][g];
      EXPECT_LE(test::relative_l2(at::tensor(at::ArrayRef<double>(row), at::kDouble), golden["full.logprob." + std::to_string(g)]),
                bound);
    }
  }

  void expect_logits(const core::model::Decoder& decoder, const Golden& golden, const RunOptions& options, double bound) {
    const at::NoGradGuard guard;
    const auto& group = golden.batch[0];
    for (size_t g = 0; g < group.responses.size(); ++g) {
      const at::Tensor logits =
          reference::response_logits(decoder, group.prompt_ids, group.responses[g].completion_ids, golden.lengths(), options);
      EXPECT_LE(test::relative_l2(logits, golden["full.logits." + std::to_string(g)]), bound) << "response " << g;
    }
  }
};

TEST_P(ReferenceGolden, FullGradientIsThatOfTransformersInFloat64) {
  const Golden golden = test::read_golden(GetParam(), "f64");
  const auto decoder = core::model::load_decoder(test::golden_folder(GetParam()), at::kDouble, at::kCPU);
  for (const Attention attention : {Attention::kTextbook, Attention::kSdpa}) {
    expect_logits(*decoder, golden, {.attention = attention}, kFloat64);
    expect_gradient(*decoder, golden, "full.grad.", {.attention = attention}, kFloat64);
  }
}

TEST_P(ReferenceGolden, CutGradientsAreThoseOfTransformersInFloat64) {
  const Golden golden = test::read_golden(GetParam(), "f64");
  if (count_under(golden, "detached.grad.") == 0) GTEST_SKIP() << "a variant of the file format only";
  const auto decoder = core::model::load_decoder(test::golden_folder(GetParam()), at::kDouble, at::kCPU);
  expect_gradient(*decoder, golden, "detached.grad.", {.tail_tokens = 0}, kFloat64);
  expect_gradient(*decoder, golden, "tail.5.grad.", {.tail_tokens = 5}, kFloat64);

  // Negative control: the cuts are far from each other and from no cut, so that a cut in the wrong place can't pass.
  const auto full = golden_gradient(*decoder, golden, "full.grad.");
  const auto tail = golden_gradient(*decoder, golden, "tail.5.grad.");
  EXPECT_GT(test::gradient_error(*decoder, golden_gradient(*decoder, golden, "detached.grad."), full).whole, 1e-2);
  const auto off_by_one = reference::weighted_gradient(*decoder, golden.batch, golden.weights, {.tail_tokens = 6});
  EXPECT_GT(test::gradient_error(*decoder, off_by_one.gradients, tail).whole, 1e-4);
  const auto whole_state = reference::weighted_gradient(*decoder, golden.batch, golden.weights, {.tail_tokens = 1000});
  EXPECT_LE(test::gradient_error(*decoder, whole_state.gradients, full).whole, kFloat64);
}

TEST_P(ReferenceGolden, Float32IsAsCloseToFloat64AsRoundingAllows) {
  if (!test::has_golden(GetParam(), "f32")) GTEST_SKIP() << "a variant of the file format only";
  const Golden exact = test::read_golden(GetParam(), "f64");
  const Golden rounded = test::read_golden(GetParam(), "f32");
  const auto decoder = core::model::load_decoder(test::golden_folder(GetParam()), at::kFloat, at::kCPU);
  const double bound = test::rounding_bound(*decoder, exact.lengths().longest, at::kFloat);
  for (const Attention attention : {Attention::kTextbook, Attention::kSdpa}) {
    expect_logits(*decoder, rounded, {.attention = attention}, bound);
    expect_gradient(*decoder, exact, "full.grad.", {.attention = attention}, bound, &rounded);
  }
  EXPECT_LE(bound, 2e-5) << "too wide to see anything";
}

// Notes what is chosen on the way.
class Watched final : public reference::WholeSequence {
 public:
  Watched() : WholeSequence(Attention::kTextbook, 0) {}
  at::Tensor choose_experts(int64_t router, const at::Tensor& scores_SE, int64_t k) override {
    return experts[router] = WholeSequence::choose_experts(router, scores_SE, k);
  }
  void select_keys(const core::model::IndexerSpec& spec, const at::Tensor& query_Shd, const at::Tensor& key_Sd,
                   const at::Tensor& weight_Sh) override {
    WholeSequence::select_keys(spec, query_Shd, key_Sd, weight_Sh);
    keys[spec.slot] = selection();
  }
  std::map<int64_t, at::Tensor> experts;  // by router
  std::map<int64_t, at::Tensor> keys;     // by slot
};

// Rows of chosen positions in rising order, as the golden has them: -1 where there are fewer than k.
at::Tensor positions_of(const at::Tensor& selected_SS, int64_t k) {
  const int64_t tokens = selected_SS.size(0);
  const at::Tensor position_SS = at::where(selected_SS, at::arange(tokens), at::full({1}, tokens, at::kLong));
  const at::Tensor first_Sk = std::get<0>(position_SS.sort(-1)).narrow(-1, 0, k);
  return at::where(first_Sk < tokens, first_Sk, at::full({1}, -1, at::kLong));
}

TEST_P(ReferenceGolden, ChoicesAreThoseOfTransformers) {
  const Golden golden = test::read_golden(GetParam(), "f64");
  const int64_t recorded = count_under(golden, "route.") + count_under(golden, "dsa.topk.");
  if (recorded == 0) GTEST_SKIP() << "a model without choices";
  const at::NoGradGuard guard;
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const auto decoder = core::model::load_decoder(test::golden_folder(GetParam()), dtype, at::kCPU);
    int64_t compared = 0;
    for (size_t g = 0; g < golden.batch[0].responses.size(); ++g) {
      Watched execution;
      const std::string response = std::to_string(g) + ".";
      const at::Tensor ids_S = at::cat({golden["input.prompt"], golden["input.resp." + std::to_string(g)]});
      const auto where = decoder->positions(at::arange(ids_S.size(0)), golden.lengths());
      at::Tensor hidden_SD = decoder->embed(ids_S, execution);
      for (int64_t n = 0; n < decoder->layers(); ++n) hidden_SD = decoder->layer(n, hidden_SD, where, execution);
      for (const auto& [router, chosen_Sk] : execution.experts) {
        const std::string layer = std::to_string(decoder->routers()[size_t(router)].layer);
        const at::Tensor wanted_Sk = golden["route." + response + layer].to(at::kLong);
        EXPECT_TRUE(at::equal(std::get<0>(chosen_Sk.sort(-1)), wanted_Sk)) << "experts of layer " << layer;
        ++compared;
      }
      for (const auto& [slot, selected_SS] : execution.keys) {
        const std::string layer = std::to_string(decoder->states()[size_t(slot)].layer);
        const at::Tensor wanted_Sk = golden["dsa.topk." + response + layer].to(at::kLong);
        EXPECT_TRUE(at::equal(positions_of(selected_SS, wanted_Sk.size(1)), wanted_Sk)) << "keys of layer " << layer;
        EXPECT_LT(wanted_Sk.size(1), ids_S.size(0) / 2) << "a selection that drops nothing shows nothing";
        ++compared;
      }
    }
    EXPECT_EQ(compared, recorded);
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, ReferenceGolden, testing::ValuesIn(test::golden_variants()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace longstraw
