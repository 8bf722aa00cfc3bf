#include "longstraw/prompt_state.h"

#include "core/base/errors.h"
#include "longstraw/trainer.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace longstraw {
namespace {

TEST(PromptState, AfterAnOptimizerStepItIsRefused) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const PromptState state(*decoder, 8, 0);
  state.check_weights(*decoder);
  at::NoGradGuard no_grad;
  decoder->parameters().back()->value.mul_(1.5);
  EXPECT_THROW(state.check_weights(*decoder), ConfigError);
}

TEST(PromptState, HoldsIsBitForBit) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const auto& a = decoder->architecture();
  PromptState state(*decoder, 8, 0);
  const at::Tensor key = at::randn({3, a.kv_heads, a.head_dim}, at::kDouble);
  state.write_rows(1, 0, 4, key);
  EXPECT_TRUE(state.holds_rows(1, 0, 4, key));
  at::Tensor other = key.clone();
  other[2][0][0] = std::nextafter(other[2][0][0].item<double>(), 1e9);
  EXPECT_FALSE(state.holds_rows(1, 0, 4, other));
}

// Responses read the state, they never write it: the second of two equal responses has the first one's log-probs.
TEST(PromptState, EveryResponseStartsFromTheSameBits) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kFloat);
  core::data::Batch batch{test::random_group(32, 12, {6, 6, 6}, 5)};
  batch[0].responses[2].completion_ids = batch[0].responses[0].completion_ids;
  batch[0].responses[0].reward = 1.0;
  batch[0].responses[1].reward = batch[0].responses[2].reward = 0.0;
  const auto step = longstraw_gradient(*decoder, batch, {.longstraw = {.segment_tokens = 5}});
  EXPECT_EQ(step.logprobs[0][0], step.logprobs[0][2]);
  EXPECT_NE(step.logprobs[0][0], step.logprobs[0][1]);
}

}  // namespace
}  // namespace longstraw
