// Positions past 65,536 and 262,144, and elements past 2^31, where a narrow index would wrap.
#include "longstraw/prompt_state.h"
#include "longstraw/sparse_attention.h"
#include "longstraw/sparse_selection.h"
#include "longstraw/trainer.h"
#include "tests/support/closeness.h"
#include "tests/support/families.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace longstraw {
namespace {

nlohmann::json config_of(const std::string& name) {
  for (const auto& family : test::small_families()) {
    if (family.name == name) return family.config;
  }
  throw std::runtime_error(name);
}

// Two ways to cut a long prompt agree, and both see its beginning: were a position or an offset to wrap, segments of other
// lengths would wrap elsewhere.
class LongPrompt : public testing::TestWithParam<std::pair<const char*, int64_t>> {};

TEST_P(LongPrompt, SegmentsDoNotMatter) {
  const auto [name, tokens] = GetParam();
  const auto decoder = test::tiny_decoder(config_of(name), at::kDouble);
  core::data::Batch batch{test::random_group(32, tokens, {3, 2}, 5)};
  batch[0].responses[0].reward = 1.0;
  batch[0].responses[1].reward = 0.0;
  const auto step = [&](int64_t segment) {
    return longstraw_gradient(*decoder, batch, {.longstraw = {.segment_tokens = segment, .memory_budget = {0}}});
  };
  const auto one = step(8192), other = step(5000);
  const auto error = test::gradient_error(*decoder, other.gradients, one.gradients, 1e-9);
  printf("    %-12s %ld tokens: relative distance %.2e\n", name, tokens, error.whole);
  EXPECT_LE(error.whole, 1e-11);  // sums over some 1e5 tokens
  EXPECT_EQ(one.facts.at("recompute_mismatches"), 0);
  EXPECT_EQ(one.facts.at("changed_choices"), 0);
}
INSTANTIATE_TEST_SUITE_P(Prompts, LongPrompt,
                         testing::Values(std::pair{"mistral_sw", int64_t{270'000}}, std::pair{"mamba2", int64_t{270'000}},
                                         std::pair{"qwen3_5", int64_t{270'000}}));

// Few queries over many keys, against all scores at once.
TEST(LargeOffsets, SelectionAmongThreeHundredThousandKeys) {
  constexpr int64_t kPast = 300'000, kTopK = 40;
  const auto options = at::TensorOptions(at::kDouble);
  const at::Tensor query_Shd = at::randn({2, 16, 8}, options), weight_Sh = at::randn({2, 16}, options);
  const at::Tensor own_Sd = at::randn({2, 8}, options), past_Nd = at::randn({kPast, 8}, options);
  const at::Tensor positions = select_top_keys({.query_Shd = query_Shd,
                                                .own_key_Sd = own_Sd,
                                                .past_key_Nd = past_Nd,
                                                .weight_Sh = weight_Sh,
                                                .spans = {{0, 2}},
                                                .top_k = kTopK});
  for (int64_t t = 0; t < 2; ++t) {
    const at::Tensor keys = at::cat({past_Nd, own_Sd.narrow(0, 0, t + 1)});
    const at::Tensor scores = at::matmul(weight_Sh[t], at::relu(at::matmul(query_Shd[t], keys.t())));
    const at::Tensor wanted = std::get<0>(std::get<1>(scores.topk(kTopK)).sort());
    EXPECT_TRUE(at::equal(positions[t].to(at::kLong), wanted));
    EXPECT_GT(wanted[-1].item<int64_t>(), 262'144);
  }
}

// Memory that is never written takes no room: only the rows that are used are touched.
TEST(LargeOffsets, RowsBehindTwoToTheThirtyOneElements) {
  const auto decoder = test::tiny_decoder(test::tiny_config({{"num_hidden_layers", 1}}), at::kBFloat16);
  const auto& rows = decoder->states()[0].rows[0];
  const int64_t capacity = (int64_t{1} << 31) / rows.width + 100;  // the second head lies behind 2^31 elements
  PromptState state(*decoder, capacity, capacity);
  const at::Tensor written = at::randn({3, rows.heads, rows.width}).to(at::kBFloat16);
  state.write_rows(0, 0, capacity - 50, written);
  EXPECT_TRUE(state.holds_rows(0, 0, capacity - 50, written));
  EXPECT_TRUE(at::equal(state.rows(0, 0, capacity - 50, 3), written.transpose(0, 1)));
}

TEST(LargeOffsets, SelectedRowsBehindTwoToTheThirtyOneElements) {
  constexpr int64_t kWidth = 64, kPast = (int64_t{1} << 31) / kWidth + 1000, kListed = 4;
  const at::Tensor past_Nd = at::empty({kPast, kWidth}, at::kBFloat16);
  const at::Tensor positions = at::tensor(std::vector<int64_t>{5, kPast - 900, kPast - 2, kPast}, at::kLong);
  const at::Tensor rows = at::randn({kListed, kWidth}).to(at::kBFloat16), query = at::randn({1, 2, kWidth}).to(at::kBFloat16);
  for (int64_t i = 0; i < 3; ++i) past_Nd[positions[i].item<int64_t>()].copy_(rows[i]);
  SparseInput input{.query_SHd = query,
                    .own_key_Sd = rows.narrow(0, 3, 1),
                    .past_key_Nd = past_Nd,
                    .positions_SK = positions.to(at::kInt).unsqueeze(0),
                    .spans = {{0, 1}},
                    .value_width = 48,
                    .scale = 0.125};
  const SparseAttention far = sparse_attend(input);
  input.past_key_Nd = rows.narrow(0, 0, 3);
  input.positions_SK = at::arange(kListed, at::kInt).unsqueeze(0);
  const SparseAttention near = sparse_attend(input);
  EXPECT_TRUE(at::equal(far.out_SHv, near.out_SHv));
  EXPECT_TRUE(at::equal(far.lse_SH, near.lse_SH));
}

}  // namespace
}  // namespace longstraw
