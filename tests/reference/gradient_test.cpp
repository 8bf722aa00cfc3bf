// What the reference promises beside the golden values.
#include "reference/gradient.h"

#include "core/base/errors.h"
#include "core/device/memory_meter.h"
#include "tests/support/closeness.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace longstraw {
namespace {

using core::data::Batch;
using core::data::PromptGroup;
using testing::HasSubstr;
using testing::Property;
using testing::Throws;

Batch rewarded_batch() {
  Batch batch{test::random_group(32, 12, {5, 1, 8}, 11)};
  batch[0].responses[0].reward = 1.0;
  batch[0].responses[1].reward = 0.0;
  batch[0].responses[2].reward = 0.25;
  return batch;
}

template <class E>
auto throws_naming(const std::string& a, const std::string& b) {
  return Throws<E>(Property(&E::what, testing::AllOf(HasSubstr(a), HasSubstr(b))));
}

TEST(ReferenceGradient, RepeatsBitForBit) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kFloat);
  const auto a = reference::reference_gradient(*decoder, rewarded_batch(), {});
  const auto b = reference::reference_gradient(*decoder, rewarded_batch(), {});
  for (size_t i = 0; i < a.gradients.size(); ++i) EXPECT_TRUE(at::equal(a.gradients[i], b.gradients[i]));
  EXPECT_EQ(a.logprobs, b.logprobs);
}

TEST(ReferenceGradient, IsTheSumOfItsResponses) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const Batch batch = rewarded_batch();
  reference::TokenWeights weights{{std::vector<double>(5, 0.5), {1.0}, std::vector<double>(8, -0.25)}};
  const auto whole = reference::weighted_gradient(*decoder, batch, weights, {});
  std::vector<at::Tensor> sum;
  for (size_t member = 0; member < 3; ++member) {
    Batch one{batch[0]};
    one[0].responses = {batch[0].responses[member]};
    const auto part = reference::weighted_gradient(*decoder, one, {{weights[0][member]}}, {});
    for (size_t i = 0; i < part.gradients.size(); ++i) {
      if (member == 0) sum.push_back(part.gradients[i]);
      else sum[i] = sum[i] + part.gradients[i];
    }
  }
  EXPECT_EQ(test::gradient_error(*decoder, whole.gradients, sum).whole, 0.0);  // the same additions in the same order
}

TEST(ReferenceGradient, GradientsOfBfloat16AreSummedInFloat32) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kBFloat16);
  const auto float64 = test::tiny_decoder(test::tiny_config(), at::kDouble);
  Batch batch{test::random_group(32, 6, std::vector<int64_t>(40, 2), 17)};
  reference::TokenWeights weights{std::vector<std::vector<double>>(40, {1.0, 1.0})};
  const auto step = reference::weighted_gradient(*decoder, batch, weights, {});
  for (const auto& gradient : step.gradients) EXPECT_EQ(gradient.scalar_type(), at::kFloat);
  // Negative control of the sum: rounded to bfloat16 after every response it is another one.
  std::vector<at::Tensor> rounded;
  for (size_t member = 0; member < 40; ++member) {
    Batch one{batch[0]};
    one[0].responses = {batch[0].responses[member]};
    const auto part = reference::weighted_gradient(*decoder, one, {{{1.0, 1.0}}}, {});
    for (size_t i = 0; i < part.gradients.size(); ++i) {
      if (member == 0) rounded.push_back(part.gradients[i].to(at::kBFloat16));
      else rounded[i] = (rounded[i].to(at::kFloat) + part.gradients[i]).to(at::kBFloat16);
    }
  }
  const auto exact = reference::weighted_gradient(*float64, batch, weights, {});
  const double ours = test::gradient_error(*decoder, step.gradients, exact.gradients).whole;
  EXPECT_LE(ours, test::rounding_bound(*decoder, 8, at::kBFloat16));
  EXPECT_LT(ours, test::gradient_error(*decoder, rounded, exact.gradients).whole);
}

TEST(ReferenceGradient, AZeroAdvantageHasNoGradient) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kFloat);
  Batch batch = rewarded_batch();
  for (auto& response : batch[0].responses) response.reward = 0.1;
  const auto step = reference::reference_gradient(*decoder, batch, {});
  for (const auto& gradient : step.gradients) EXPECT_EQ(gradient.abs().max().item<double>(), 0.0);
}

TEST(ReferenceGradient, APromptOfOneTokenHasNoStateToCut) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const Batch batch{test::random_group(32, 1, {3}, 4)};
  const reference::TokenWeights weights{{{1.0, 1.0, 1.0}}};
  const auto full = reference::weighted_gradient(*decoder, batch, weights, {});
  const auto detached = reference::weighted_gradient(*decoder, batch, weights, {.tail_tokens = 0});
  for (size_t i = 0; i < full.gradients.size(); ++i) EXPECT_TRUE(at::equal(full.gradients[i], detached.gradients[i]));
}

TEST(ReferenceGradient, TemperatureDividesTheLogits) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const Batch batch = rewarded_batch();
  const auto& response = batch[0].responses[2];
  const at::NoGradGuard guard;
  const at::Tensor logits = reference::response_logits(*decoder, batch[0].prompt_ids, response.completion_ids, {13, 20}, {});
  reference::ReferenceOptions options;
  options.temperature = 0.5;
  const auto step = reference::reference_gradient(*decoder, batch, options);
  const at::Tensor logprobs = at::log_softmax(logits * 2, -1);
  for (size_t t = 0; t < response.completion_ids.size(); ++t) {
    EXPECT_NEAR(step.logprobs[0][2][t], logprobs[int64_t(t)][response.completion_ids[t]].item<double>(), 1e-14);
  }
}

TEST(ReferenceGradient, ScoresAreTheGradientsOwnBitForBit) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kFloat);
  const Batch batch = rewarded_batch();
  reference::ReferenceOptions options;
  options.temperature = 0.7;
  EXPECT_TRUE(reference::reference_scores(*decoder, batch, options).entropies.empty());
  EXPECT_TRUE(reference::reference_gradient(*decoder, batch, options).entropies.empty());
  options.entropy = true;
  const auto scores = reference::reference_scores(*decoder, batch, options);
  const auto step = reference::reference_gradient(*decoder, batch, options);
  EXPECT_EQ(scores.logprobs, step.logprobs);
  EXPECT_EQ(scores.entropies, step.entropies);
  options.objective.entropy_coef = 0.1;
  EXPECT_EQ(reference::reference_gradient(*decoder, batch, options).entropies, scores.entropies) << "with their graph";
}

TEST(ReferenceGradient, EntropiesAreThoseOfTheDividedLogits) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const Batch batch = rewarded_batch();
  const at::NoGradGuard guard;
  reference::ReferenceOptions options{.temperature = 0.5, .entropy = true};
  const auto scores = reference::reference_scores(*decoder, batch, options);
  const at::Tensor logits =
      reference::response_logits(*decoder, batch[0].prompt_ids, batch[0].responses[2].completion_ids, {13, 20}, {});
  const at::Tensor p = at::softmax(logits * 2, -1);
  for (int64_t t = 0; t < p.size(0); ++t) {
    EXPECT_NEAR(scores.entropies[0][2][size_t(t)], at::special_entr(p[t]).sum().item<double>(), 1e-14);  // of at most log 32
  }
}

TEST(ReferenceGradient, AKlInTheRewardOfAnOnPolicyBatchIsScoredFirst) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  Batch batch = rewarded_batch();
  for (auto& response : batch[0].responses) response.ref_logprobs.emplace(response.completion_ids.size(), -3.0);
  reference::ReferenceOptions options;
  options.objective.beta = 0.1;
  options.objective.kl_in = core::objective::KlPlace::kReward;
  const auto scored = reference::reference_gradient(*decoder, batch, options);
  EXPECT_GT(scored.seconds.at("scoring"), 0.0);
  const auto scores = reference::reference_scores(*decoder, batch, options);
  for (size_t member = 0; member < 3; ++member) batch[0].responses[member].old_logprobs = scores.logprobs[0][member];
  const auto given = reference::reference_gradient(*decoder, batch, options);
  EXPECT_EQ(given.seconds.count("scoring"), 0u);
  EXPECT_EQ(scored.advantages, given.advantages);
  EXPECT_EQ(test::gradient_error(*decoder, scored.gradients, given.gradients).whole, 0.0);
}

TEST(ReferenceGradient, RefusesWhatTheModelCannotRead) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kFloat);
  Batch batch = rewarded_batch();
  batch[0].responses[1].completion_ids = {32};
  EXPECT_THAT([&] { reference::reference_gradient(*decoder, batch, {}); }, throws_naming<FormatError>("response 1", "id 32"));
  batch[0].responses[1].completion_ids = {};
  EXPECT_THAT([&] { reference::reference_gradient(*decoder, batch, {}); }, throws_naming<FormatError>("response 1", "empty"));
  batch = rewarded_batch();
  batch[0].prompt_ids[3] = -1;
  EXPECT_THAT([&] { reference::reference_gradient(*decoder, batch, {}); }, throws_naming<FormatError>("prompt p11", "id -1"));
}

TEST(ReferenceGradient, MeasuresTimeAndMemory) {
  core::device::install_counting_allocator();
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kFloat);
  const auto step = reference::reference_gradient(*decoder, rewarded_batch(), {});
  EXPECT_GT(step.seconds.at("forward"), 0.0);
  EXPECT_GE(step.seconds.at("total"), step.seconds.at("forward") + step.seconds.at("backward"));
  int64_t gradient_bytes = 0;
  for (const auto& gradient : step.gradients) gradient_bytes += int64_t(gradient.nbytes());
  EXPECT_GT(step.bytes.at("peak_bytes"), gradient_bytes);

  // sdpa keeps no S × S scores: at 1,024 tokens, 4 heads and 2 layers their share is plain to see.
  const Batch longer{test::random_group(32, 1023, {1}, 5)};
  const reference::TokenWeights weights{{{1.0}}};
  const auto textbook = reference::weighted_gradient(*decoder, longer, weights, {});
  const auto sdpa = reference::weighted_gradient(*decoder, longer, weights, {.attention = reference::Attention::kSdpa});
  EXPECT_GT(textbook.bytes.at("peak_bytes"), int64_t(2) * 4 * 1024 * 1024 * 4);
  EXPECT_LT(sdpa.bytes.at("peak_bytes"), textbook.bytes.at("peak_bytes") / 4);
  EXPECT_LE(test::gradient_error(*decoder, sdpa.gradients, textbook.gradients).whole,
            test::rounding_bound(*decoder, 1024, at::kFloat));
}

}  // namespace
}  // namespace longstraw
