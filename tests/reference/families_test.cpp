// What the reference promises on every family, beside the golden values: cuts, and prompts and responses shorter than a
// convolution.
#include "reference/gradient.h"
#include "tests/support/closeness.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

namespace longstraw {
namespace {

using core::data::Batch;
using core::model::StepGradient;
using reference::TokenWeights;

class ReferenceFamily : public testing::TestWithParam<std::string> {
 protected:
  const std::unique_ptr<core::model::Decoder> decoder_ =
      core::model::load_decoder(test::golden_folder(GetParam()), at::kDouble, at::kCPU);

  Batch batch(int64_t prompt_tokens, const std::vector<int64_t>& responses) const {
    return {test::random_group(decoder_->architecture().vocab, prompt_tokens, responses, 29)};
  }
  StepGradient gradient(const Batch& batch, std::optional<int64_t> tail = std::nullopt) const {
    TokenWeights weights{{}};
    double next = 0.7;
    for (const auto& response : batch[0].responses) {
      auto& row = weights[0].emplace_back();
      for (size_t t = 0; t < response.completion_ids.size(); ++t) row.push_back(next = -next * 0.9);
    }
    return reference::weighted_gradient(*decoder_, batch, weights, {.tail_tokens = tail});
  }
  static bool same(const StepGradient& a, const StepGradient& b) {
    for (size_t i = 0; i < a.gradients.size(); ++i) {
      if (!at::equal(a.gradients[i], b.gradients[i])) return false;
    }
    return true;
  }
  static bool finite(const StepGradient& step) {
    for (const auto& gradient : step.gradients) {
      if (!at::isfinite(gradient).all().item<bool>()) return false;
    }
    return true;
  }
};

TEST_P(ReferenceFamily, ACutAnywhereChangesTheGradientAndNoValue) {
  const Batch group = batch(7, {4, 2});
  const StepGradient full = gradient(group);
  for (int64_t tail = 0; tail < 6; ++tail) {
    const StepGradient cut = gradient(group, tail);
    EXPECT_EQ(cut.loss, full.loss) << tail;
    EXPECT_EQ(cut.logprobs, full.logprobs) << tail;
    EXPECT_TRUE(finite(cut)) << tail;
    EXPECT_GT(test::gradient_error(*decoder_, cut.gradients, full.gradients).whole, 1e-6) << tail;
  }
  EXPECT_TRUE(same(gradient(group, 6), full)) << "the whole state";
}

TEST_P(ReferenceFamily, TheLastLayersOutputDoesNotSeeTheCut) {
  // What the prompt leaves reaches nothing behind the last mixer: the gradient of the output weight and of the final norm
  // is the same, unless the output weight is the embedding.
  const Batch group = batch(6, {3});
  const StepGradient full = gradient(group), detached = gradient(group, 0);
  const auto& parameters = decoder_->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool output = parameters[i].get() == &decoder_->output_weight() && !decoder_->architecture().tied_embeddings;
    const bool final_norm = parameters[i]->name == "model.norm.weight" || parameters[i]->name == "backbone.norm_f.weight";
    if (output || final_norm) {
      EXPECT_TRUE(at::equal(full.gradients[i], detached.gradients[i])) << parameters[i]->name;
    }
  }
}

TEST_P(ReferenceFamily, PromptsAndResponsesMayBeShorterThanAConvolution) {
  for (const int64_t prompt_tokens : {1, 2, 3}) {
    const Batch group = batch(prompt_tokens, {1, 2});
    const StepGradient full = gradient(group), detached = gradient(group, 0);
    EXPECT_TRUE(finite(full));
    EXPECT_EQ(full.loss, detached.loss);
    // A prompt of one token leaves no state before it that could be cut.
    EXPECT_EQ(same(full, detached), prompt_tokens == 1) << prompt_tokens;
  }
}

TEST_P(ReferenceFamily, AResponseDoesNotSeeItsNeighbours) {
  const Batch group = batch(5, {3, 1, 4});
  Batch alone = group;
  alone[0].responses = {group[0].responses[1]};
  EXPECT_EQ(gradient(group).logprobs[0][1], gradient(alone).logprobs[0][0]);
}

INSTANTIATE_TEST_SUITE_P(Families, ReferenceFamily, testing::ValuesIn(test::golden_families()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace longstraw
