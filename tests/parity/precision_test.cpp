// What float32 and bfloat16 cost LongStraw, next to what they cost the reference (DESIGN 9), and what twenty optimizer
// steps make of the difference.
#include "longstraw/trainer.h"

#include "reference/gradient.h"
#include "tests/support/closeness.h"
#include "tests/support/families.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

namespace longstraw {
namespace {

using core::data::Batch;
using core::model::Decoder;
using core::model::StepGradient;

// Wide and long enough that roundings average out.
std::vector<test::Family> families() {
  std::vector<test::Family> all;
  const auto dense = [&](const char* name, const nlohmann::json& changes) {
    auto config = test::tiny_config({{"hidden_size", 64},
                                     {"intermediate_size", 128},
                                     {"num_attention_heads", 4},
                                     {"num_key_value_heads", 2},
                                     {"head_dim", 16},
                                     {"num_hidden_layers", 3},
                                     {"vocab_size", 96}});
    config.merge_patch(changes);
    all.push_back({name, config});
  };
  dense("llama", {{"model_type", "llama"}});
  dense("llama_tied", {{"model_type", "llama"}, {"tie_word_embeddings", true}});
  dense("mistral_window", {{"model_type", "mistral"}, {"sliding_window", 24}});
  dense("qwen2_mixed", {{"model_type", "qwen2"}, {"use_sliding_window", true}, {"sliding_window", 20}, {"max_window_layers", 1}});
  dense("qwen3", {{"model_type", "qwen3"}});
  for (auto& family : test::wide_families()) all.push_back(std::move(family));
  return all;
}

Batch batch_of(uint64_t seed) {
  Batch batch{test::random_group(96, 90, {20, 7, 1, 33}, seed)};
  for (size_t m = 0; m < 4; ++m) batch[0].responses[m].reward = double(m % 3) - 0.5;
  return batch;
}

StepGradient longstraw_step(const Decoder& decoder, const Batch& batch, PromptGradient arm) {
  return longstraw_gradient(
      decoder, batch,
      {.longstraw = {.prompt_gradient = arm, .tail_tokens = 30, .segment_tokens = 32, .replay_batch = 2, .memory_budget = {0}}});
}
StepGradient reference_step(const Decoder& decoder, const Batch& batch, PromptGradient arm) {
  reference::ReferenceOptions options{.max_completion_length = 64};
  if (arm == PromptGradient::kDetached) options.run.tail_tokens = 0;
  if (arm == PromptGradient::kTail) options.run.tail_tokens = 30;
  return reference::reference_gradient(decoder, batch, options);
}

double whole(const Decoder& decoder, const StepGradient& got, const StepGradient& wanted) {
  return test::gradient_error(decoder, got.gradients, wanted.gradients).whole;
}

TEST(Precision, Float32IsWithinTheBoundsOfTheDesign) {
  double worst_distance = 0.0, worst_ratio = 0.0;
  for (const test::Family& family : families()) {
    const auto single = test::tiny_decoder(family.config, at::kFloat),
               exact = test::tiny_decoder(family.config, at::kDouble);
    for (const auto arm : {PromptGradient::kExact, PromptGradient::kDetached, PromptGradient::kTail}) {
      const Batch batch = batch_of(11);
      const auto reference = reference_step(*single, batch, arm), truth = reference_step(*exact, batch, arm);
      const auto got = longstraw_step(*single, batch, arm);
      const double distance = whole(*single, got, reference), noise = whole(*single, reference, truth);
      EXPECT_LE(distance, 1e-5) << family.name;
      EXPECT_LE(distance, 2 * noise) << family.name;
      worst_distance = std::max(worst_distance, distance);
      worst_ratio = std::max(worst_ratio, distance / noise);
    }
  }
  printf("    float32: worst distance %.2e (bound 1e-05), worst multiple of the reference's own %.2f (bound 2)\n", worst_distance,
         worst_ratio);
}

TEST(Precision, Bfloat16ErrorIsNoLargerThanTheReferences) {
  double worst = 0.0;
  for (const test::Family& family : families()) {
    const auto half = test::tiny_decoder(family.config, at::kBFloat16),
               single = test::tiny_decoder(family.config, at::kFloat);
    // The same weights on both sides: those that bfloat16 holds.
    {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < half->parameters().size(); ++i) single->parameters()[i]->value.copy_(half->parameters()[i]->value);
    }
    double ours = 0.0, theirs = 0.0;  // root mean square over batches: one batch's error is a draw
    for (const uint64_t seed : {1, 2, 3, 4, 5, 6}) {
      const Batch batch = batch_of(seed);
      const auto truth = reference_step(*single, batch, PromptGradient::kExact);
      ours += std::pow(whole(*single, longstraw_step(*half, batch, PromptGradient::kExact), truth), 2);
      theirs += std::pow(whole(*single, reference_step(*half, batch, PromptGradient::kExact), truth), 2);
    }
    const double ratio = std::sqrt(ours / theirs);
    printf("    bfloat16 %-16s error %.2e, the reference's %.2e, ratio %.3f\n", family.name.c_str(), std::sqrt(ours / 6),
           std::sqrt(theirs / 6), ratio);
    EXPECT_LE(ratio, 1.1) << family.name;
    worst = std::max(worst, ratio);
  }
}

// Step 1 may agree and step 2 not: parameters after many steps, each from its own gradients.
TEST(Precision, TwentyOptimizerStepsEndAtTheSameParameters) {
  for (const test::Family& family : families()) {
    std::vector<std::unique_ptr<Decoder>> decoders;
    for (const bool exact : {true, false}) {
      auto decoder = test::tiny_decoder(family.config, at::kDouble);
      std::vector<at::Tensor> values;
      for (const auto& parameter : decoder->parameters()) values.push_back(parameter->value);
      torch::optim::AdamW optimizer(values, torch::optim::AdamWOptions(1e-2));
      for (uint64_t step = 0; step < 20; ++step) {
        const Batch batch = batch_of(100 + step % 4);
        auto gradient = exact ? longstraw_step(*decoder, batch, PromptGradient::kExact)
                              : reference_step(*decoder, batch, PromptGradient::kExact);
        for (size_t i = 0; i < values.size(); ++i) values[i].mutable_grad() = gradient.gradients[i];
        optimizer.step();
      }
      decoders.push_back(std::move(decoder));
    }
    std::vector<at::Tensor> got, wanted, start;
    const auto untouched = test::tiny_decoder(family.config, at::kDouble);
    for (const auto& parameter : untouched->parameters()) start.push_back(parameter->value.detach());
    for (size_t i = 0; i < decoders[0]->parameters().size(); ++i) {
      got.push_back(decoders[0]->parameters()[i]->value.detach());
      wanted.push_back(decoders[1]->parameters()[i]->value.detach());
    }
    const auto error = test::gradient_error(*decoders[0], got, wanted);
    printf("    after 20 AdamW steps, %-16s relative distance %.2e, worst %.2e\n", family.name.c_str(), error.whole, error.worst);
    EXPECT_LE(error.whole, 1e-9) << family.name;
    EXPECT_GT(test::gradient_error(*decoders[0], got, start).whole, 1e-2) << "the steps went nowhere";

    // Negative control: one step of the detached arm in place of the exact one leaves parameters elsewhere.
    const auto moved = longstraw_step(*decoders[0], batch_of(1), PromptGradient::kDetached);
    EXPECT_GT(whole(*decoders[0], moved, longstraw_step(*decoders[0], batch_of(1), PromptGradient::kExact)), 1e-3);
  }
}

}  // namespace
}  // namespace longstraw
