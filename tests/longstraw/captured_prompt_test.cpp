// A prompt that is captured once serves sampling, scoring and training, and changes no bit of any of them.
#include "longstraw/captured_prompt.h"

#include "core/base/errors.h"
#include "core/model/lora.h"
#include "longstraw/prompt_capture.h"
#include "longstraw/token_tree.h"
#include "longstraw/trainer.h"
#include "reference/gradient.h"
#include "tests/support/families.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

namespace longstraw {
namespace {

using core::data::Batch;
using core::model::Decoder;
using core::model::StepGradient;

constexpr int64_t kPrompt = 24;
constexpr int64_t kSegment = 7;

const std::vector<LongstrawConfig>& arms() {
  static const std::vector<LongstrawConfig> kArms{
      {.prompt_gradient = PromptGradient::kExact, .segment_tokens = kSegment, .replay_batch = 2},
      {.prompt_gradient = PromptGradient::kTail, .tail_tokens = 10, .segment_tokens = kSegment, .replay_batch = 2},
      {.prompt_gradient = PromptGradient::kDetached, .segment_tokens = kSegment, .replay_batch = 2}};
  return kArms;
}

// Responses shorter than a segment, longer than one, and longer than two; one has no advantage.
core::data::PromptGroup group_of(int64_t vocab, uint64_t seed) {
  core::data::PromptGroup group = test::random_group(vocab, kPrompt, {5, 9, 3, 17}, seed);
  group.prompt_id = std::to_string(seed);
  const double advantages[] = {1.0, -0.5, 0.0, 0.75};
  for (size_t m = 0; m < group.responses.size(); ++m) group.responses[m].advantage = advantages[m];
  return group;
}

CaptureOptions options_for(const LongstrawConfig& config, int64_t graph_budget = 0) {
  return {.longstraw = config, .lengths = {kPrompt + 1, kPrompt + 17}, .graph_budget = graph_budget};
}

void expect_same_step(const StepGradient& got, const StepGradient& wanted, const std::string& what) {
  ASSERT_EQ(got.gradients.size(), wanted.gradients.size());
  for (size_t i = 0; i < wanted.gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(got.gradients[i], wanted.gradients[i])) << what << ": parameter " << i;
  }
  EXPECT_EQ(got.logprobs, wanted.logprobs) << what;
  EXPECT_EQ(got.loss, wanted.loss) << what;
  EXPECT_EQ(got.facts.at("recompute_mismatches"), 0) << what;
  EXPECT_EQ(got.facts.at("changed_choices"), 0) << what;
}

class CapturedPromptOfFamily : public testing::TestWithParam<test::Family> {};

TEST_P(CapturedPromptOfFamily, GivesTheGradientOfAStepThatCapturesItselfBitForBitAnyNumberOfTimes) {
  const int64_t vocab = GetParam().config["vocab_size"];
  const Batch batch{group_of(vocab, 3)};
  for (const auto dtype : {at::kDouble, at::kBFloat16}) {
    const auto decoder = test::tiny_decoder(GetParam().config, dtype);
    for (const LongstrawConfig& arm : arms()) {
      if (dtype == at::kBFloat16 && arm.prompt_gradient != PromptGradient::kExact) continue;
      const StepGradient plain = longstraw_gradient(*decoder, batch, {.longstraw = arm});
      ASSERT_EQ(plain.facts.at("captured_tokens"), kPrompt - 1);
      for (const int64_t graph_budget : {int64_t{0}, int64_t{1} << 30}) {
        const std::string what = GetParam().name + " " + std::string(core::config::name_of(arm.prompt_gradient)) + " " +
                                 c10::toString(dtype) + (graph_budget > 0 ? " graphs kept" : "");
        CapturedPrompt prompt(*decoder, batch[0].prompt_ids, options_for(arm, graph_budget));
        EXPECT_EQ(prompt.captured_tokens(), kPrompt - 1);
        const TrainerOptions options{.longstraw = arm, .captured = {&prompt}};
        for (const char* use : {" first use", " second use"}) {
          if (graph_budget == 0 && dtype == at::kBFloat16) continue;  // the second use with graphs is one without
          const StepGradient step = longstraw_gradient(*decoder, batch, options);
          expect_same_step(step, plain, what + use);
          EXPECT_EQ(step.facts.at("captured_tokens"), 0) << what;
          EXPECT_EQ(step.facts.at("reused_tokens"), kPrompt - 1) << what;
          EXPECT_EQ(step.facts.at("stale_prompts"), 0) << what;
          longstraw_scores(*decoder, batch, options);
        }
      }
    }
  }
}

// One prompt forward for all three: what sampling, scoring and training run of the prompt is what its capture ran.
TEST_P(CapturedPromptOfFamily, IsRunOnceForSamplingScoringAndTraining) {
  const int64_t vocab = GetParam().config["vocab_size"];
  const auto decoder = test::tiny_decoder(GetParam().config, at::kFloat);
  const Batch batch{group_of(vocab, 4)};
  for (const LongstrawConfig& arm : arms()) {
    int64_t captured = 0;
    TrainerOptions options{.longstraw = arm};
    options.progress = [&](const char* phase, int64_t tokens) {
      if (std::string(phase) == "capture") captured = tokens;
    };
    CaptureOptions capture = options_for(arm, int64_t{1} << 30);
    int64_t progress = 0;
    capture.progress = [&](int64_t tokens) { progress = tokens; };
    CapturedPrompt prompt(*decoder, batch[0].prompt_ids, capture);
    EXPECT_EQ(progress, kPrompt - 1);
    const SamplerOptions sampling{.rollout = {.num_generations = 3, .max_completion_length = 9, .seed = 5}};
    const auto first = prompt.sample(2, sampling);
    options.captured = {&prompt};
    const auto scores = longstraw_scores(*decoder, batch, options);
    const StepGradient step = longstraw_gradient(*decoder, batch, options);
    EXPECT_EQ(captured, 0);
    const int64_t swept = kPrompt - 1 - gradient_cut(kPrompt, arm);
    EXPECT_GE(step.facts.at("kept_tokens"), swept) << GetParam().name;
    EXPECT_EQ(step.facts.at("recomputed_tokens"), 0) << GetParam().name;
    EXPECT_EQ(prompt.captured_tokens(), kPrompt - 1);
    // All of it left the state as it was.
    const auto again = prompt.sample(2, sampling);
    for (size_t m = 0; m < first.size(); ++m) {
      EXPECT_EQ(again[m].completion_ids, first[m].completion_ids) << GetParam().name;
      EXPECT_EQ(again[m].sampling_logprobs, first[m].sampling_logprobs) << GetParam().name;
    }
  }
}

TEST_P(CapturedPromptOfFamily, ScoresAreTheLogprobsOfTheGradientsPass) {
  const int64_t vocab = GetParam().config["vocab_size"];
  const auto decoder = test::tiny_decoder(GetParam().config, at::kFloat);
  const Batch batch{group_of(vocab, 5), group_of(vocab, 6)};
  for (LongstrawConfig arm : arms()) {
    arm.replay_batch = 1;  // the gradient's pass runs responses without a gradient by themselves
    const StepGradient step = longstraw_gradient(*decoder, batch, {.longstraw = arm});
    EXPECT_EQ(longstraw_scores(*decoder, batch, {.longstraw = arm}).logprobs, step.logprobs) << GetParam().name;
    CapturedPrompt prompt(*decoder, batch[1].prompt_ids, options_for(arm));
    const TrainerOptions options{.longstraw = arm, .captured = {nullptr, &prompt}};
    EXPECT_EQ(longstraw_scores(*decoder, batch, options).logprobs, step.logprobs) << GetParam().name;
  }
}

TEST_P(CapturedPromptOfFamily, SamplesWhatSampleGroupSamples) {
  const auto decoder = test::tiny_decoder(GetParam().config, at::kFloat);
  const auto ids = test::random_group(GetParam().config["vocab_size"], kPrompt, {1}, 8).prompt_ids;
  const SamplerOptions options{.rollout = {.num_generations = 3, .max_completion_length = 12, .seed = 5},
                               .segment_tokens = kSegment};
  const auto wanted = sample_group(*decoder, ids, 1, options);
  for (const LongstrawConfig& arm : arms()) {
    if (arm.prompt_gradient == PromptGradient::kTail) continue;  // its cut is one more border, and rounds otherwise
    CaptureOptions capture = options_for(arm);
    capture.lengths = {kPrompt + 1, kPrompt + 12};
    const auto got = CapturedPrompt(*decoder, ids, capture).sample(1, options);
    for (size_t m = 0; m < wanted.size(); ++m) {
      EXPECT_EQ(got[m].completion_ids, wanted[m].completion_ids) << GetParam().name;
      EXPECT_EQ(got[m].sampling_logprobs, wanted[m].sampling_logprobs) << GetParam().name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, CapturedPromptOfFamily, testing::ValuesIn(test::small_families()),
                         [](const auto& info) { return info.param.name; });

class CapturedPrompts : public testing::Test {
 protected:
  void SetUp() override { decoder_ = test::tiny_decoder(test::tiny_config(), at::kDouble); }
  std::unique_ptr<Decoder> decoder_;
};

// Those that were captured are walked one by one, the others together in the place of the first of them.
TEST_F(CapturedPrompts, AreWalkedBesidePromptsThatWereNotCaptured) {
  const core::data::PromptGroup a = group_of(32, 11), b = group_of(32, 12), c = group_of(32, 13);
  for (const LongstrawConfig& arm : arms()) {
    CapturedPrompt of_a(*decoder_, a.prompt_ids, options_for(arm)), of_b(*decoder_, b.prompt_ids, options_for(arm)),
        of_c(*decoder_, c.prompt_ids, options_for(arm));
    const StepGradient plain = longstraw_gradient(*decoder_, {a, b, c}, {.longstraw = arm});
    const auto step = [&](const Batch& batch, std::vector<CapturedPrompt*> captured) {
      return longstraw_gradient(*decoder_, batch, {.longstraw = arm, .captured = std::move(captured)});
    };
    expect_same_step(step({a, b, c}, {&of_a, &of_b, &of_c}), plain, "all");
    expect_same_step(step({a, b, c}, {&of_a, nullptr, nullptr}), plain, "the first");
    expect_same_step(step({a, b, c}, {nullptr, nullptr, nullptr}), plain, "none");
    const StepGradient mixed = step({a, b, c}, {nullptr, &of_b, nullptr});
    const StepGradient in_that_order = longstraw_gradient(*decoder_, {a, c, b}, {.longstraw = arm});
    for (size_t i = 0; i < mixed.gradients.size(); ++i) {
      EXPECT_TRUE(at::equal(mixed.gradients[i], in_that_order.gradients[i])) << i;
    }
    EXPECT_EQ(mixed.logprobs, plain.logprobs);
    EXPECT_EQ(mixed.facts.at("captured_tokens"), 2 * (kPrompt - 1));
    EXPECT_EQ(mixed.facts.at("reused_tokens"), kPrompt - 1);
  }
}

// A mini-batch split of one group: the prompt's state serves every part.
TEST_F(CapturedPrompts, ServeTheMiniBatchesOfAGroup) {
  const core::data::PromptGroup whole = group_of(32, 14);
  for (const LongstrawConfig& arm : arms()) {
    CapturedPrompt prompt(*decoder_, whole.prompt_ids, options_for(arm, int64_t{1} << 30));
    for (const size_t first : {size_t{0}, size_t{2}}) {
      core::data::PromptGroup part = whole;
      part.responses = {whole.responses[first], whole.responses[first + 1]};
      expect_same_step(longstraw_gradient(*decoder_, {part}, {.longstraw = arm, .captured = {&prompt}}),
                       longstraw_gradient(*decoder_, {part}, {.longstraw = arm}), "part");
    }
  }
}

// Prompts that begin alike share nodes when they are not captured: the same sum in another order, and other segments.
TEST_F(CapturedPrompts, ThatBeginAlikeAreWalkedByThemselves) {
  core::data::PromptGroup a = group_of(32, 15), b = group_of(32, 16);
  std::copy(a.prompt_ids.begin(), a.prompt_ids.begin() + 12, b.prompt_ids.begin());
  for (const LongstrawConfig& arm : arms()) {
    CapturedPrompt of_a(*decoder_, a.prompt_ids, options_for(arm)), of_b(*decoder_, b.prompt_ids, options_for(arm));
    const StepGradient got = longstraw_gradient(*decoder_, {a, b}, {.longstraw = arm, .captured = {&of_a, &of_b}});
    const StepGradient wanted = longstraw_gradient(*decoder_, {a, b}, {.longstraw = arm});
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < wanted.gradients.size(); ++i) {
      difference += (got.gradients[i] - wanted.gradients[i]).square().sum().item<double>();
      norm += wanted.gradients[i].square().sum().item<double>();
    }
    EXPECT_LE(std::sqrt(difference / norm), 1e-12);  // the project's bound for float64 (DESIGN, numbers to meet)
  }
}

TEST_F(CapturedPrompts, OfOneTokenHaveNoState) {
  core::data::PromptGroup group = test::random_group(32, 1, {4, 9}, 17);
  group.responses[0].advantage = 1.0;
  group.responses[1].advantage = -1.0;
  for (const LongstrawConfig& arm : arms()) {
    CapturedPrompt prompt(*decoder_, group.prompt_ids, {.longstraw = arm, .lengths = {2, 12}});
    EXPECT_EQ(prompt.captured_tokens(), 0);
    EXPECT_EQ(prompt.sample(0, {.rollout = {.num_generations = 2, .max_completion_length = 4}}).size(), 2u);
    expect_same_step(longstraw_gradient(*decoder_, {group}, {.longstraw = arm, .captured = {&prompt}}),
                     longstraw_gradient(*decoder_, {group}, {.longstraw = arm}), "one token");
  }
}

TEST_F(CapturedPrompts, OfOtherWeightsAreRefused) {
  const Batch batch{group_of(32, 18)};
  for (const LongstrawConfig& arm : arms()) {
    CapturedPrompt prompt(*decoder_, batch[0].prompt_ids, options_for(arm));
    EXPECT_TRUE(prompt.is_current());
    at::NoGradGuard no_grad;
    decoder_->parameters().front()->value.mul_(1.25);
    EXPECT_FALSE(prompt.is_current());
    const TrainerOptions options{.longstraw = arm, .captured = {&prompt}};
    EXPECT_THROW(longstraw_gradient(*decoder_, batch, options), ConfigError);
    EXPECT_THROW(longstraw_scores(*decoder_, batch, options), ConfigError);
    EXPECT_THROW(prompt.sample(0, {}), ConfigError);
  }
}

// The whole way of an objective that couples tokens and has an entropy bonus: scoring pass, entropies, both derivatives.
TEST_F(CapturedPrompts, GiveTheReferencesGradientOfACoupledObjectiveWithEntropies) {
  Batch batch{group_of(32, 23)};
  for (auto& response : batch[0].responses) response.old_logprobs = std::vector<double>(response.completion_ids.size(), -3.4);
  core::objective::ObjectiveConfig objective{.loss_type = core::objective::LossType::kGspo, .epsilon = 0.5, .entropy_coef = 0.3};
  const StepGradient wanted = reference::reference_gradient(*decoder_, batch, {.objective = objective});
  CapturedPrompt prompt(*decoder_, batch[0].prompt_ids, options_for(arms()[0]));
  const TrainerOptions options{.longstraw = arms()[0], .objective = objective, .captured = {&prompt}};
  const StepGradient got = longstraw_gradient(*decoder_, batch, options);
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < wanted.gradients.size(); ++i) {
    difference += (got.gradients[i] - wanted.gradients[i]).square().sum().item<double>();
    norm += wanted.gradients[i].square().sum().item<double>();
  }
  EXPECT_LE(std::sqrt(difference / norm), 1e-12);  // the project's bound for float64
  EXPECT_NEAR(got.loss, wanted.loss, 1e-12 * std::abs(wanted.loss));
  EXPECT_NEAR(got.loss_parts.at("entropy"), wanted.loss_parts.at("entropy"), 1e-12 * std::abs(wanted.loss_parts.at("entropy")));
  EXPECT_NE(got.loss_parts.at("entropy"), 0.0);
  EXPECT_TRUE(got.seconds.contains("scoring"));
  EXPECT_EQ(got.facts.at("captured_tokens"), 0);
  ASSERT_EQ(got.entropies.size(), 1u);
  for (size_t m = 0; m < got.entropies[0].size(); ++m) {
    for (const double entropy : got.entropies[0][m]) EXPECT_TRUE(entropy > 0.0 && entropy < std::log(32.0));
  }
}

// Adapters are weights too: with them left out, the state is another decoder's.
TEST_F(CapturedPrompts, OfADecoderWithAdapters) {
  core::model::add_lora(*decoder_, {.r = 3});
  {
    at::NoGradGuard no_grad;
    for (const auto& parameter : decoder_->parameters()) parameter->value.add_(0.05);  // B starts at zero
  }
  const Batch batch{group_of(32, 22)};
  for (const LongstrawConfig& arm : arms()) {
    CapturedPrompt prompt(*decoder_, batch[0].prompt_ids, options_for(arm, int64_t{1} << 30));
    const TrainerOptions options{.longstraw = arm, .captured = {&prompt}};
    const StepGradient plain = longstraw_gradient(*decoder_, batch, {.longstraw = arm});
    for (const char* use : {"first", "second"}) expect_same_step(longstraw_gradient(*decoder_, batch, options), plain, use);
    const core::model::WithoutAdapters base(*decoder_);
    EXPECT_FALSE(prompt.is_current());
    EXPECT_THROW(longstraw_scores(*decoder_, batch, options), ConfigError);
  }
}

// The state stays that of the old weights: where it does not depend on the weight that changed, nothing is stale about it.
TEST_F(CapturedPrompts, ThatMayBeStaleReadTheOldStateWithTheNewWeights) {
  const Batch batch{group_of(32, 19)};
  const LongstrawConfig detached = arms()[2];
  CaptureOptions options = options_for(detached);
  options.allow_stale = true;
  for (const bool is_of_state : {false, true}) {
    CapturedPrompt prompt(*decoder_, batch[0].prompt_ids, options);
    {
      at::NoGradGuard no_grad;
      const auto& changed = is_of_state ? decoder_->parameters().front() : decoder_->parameters().back();
      changed->value.mul_(1.25);
    }
    const StepGradient stale = longstraw_gradient(*decoder_, batch, {.longstraw = detached, .captured = {&prompt}});
    const StepGradient fresh = longstraw_gradient(*decoder_, batch, {.longstraw = detached});
    EXPECT_EQ(stale.facts.at("stale_prompts"), 1);
    EXPECT_EQ(stale.logprobs == fresh.logprobs, !is_of_state);
    EXPECT_EQ(at::equal(stale.gradients[1], fresh.gradients[1]), !is_of_state);
    prompt.sample(0, {.rollout = {.max_completion_length = 2}});
  }
  options.longstraw = arms()[0];
  EXPECT_THROW(CapturedPrompt(*decoder_, batch[0].prompt_ids, options), ConfigError);
}

std::string refusal(const CapturedPrompt& prompt, const core::data::PromptGroup& group, const LongstrawConfig& config) {
  try {
    prompt.check_fits(group, config);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_F(CapturedPrompts, SayWhatDoesNotFit) {
  const core::data::PromptGroup group = group_of(32, 20);
  const LongstrawConfig tail = arms()[1];
  const CapturedPrompt prompt(*decoder_, group.prompt_ids, options_for(tail));
  EXPECT_EQ(refusal(prompt, group, tail), "");
  EXPECT_NE(refusal(prompt, group, arms()[0]).find("prompt_gradient tail, used under exact"), std::string::npos);
  LongstrawConfig other = tail;
  other.segment_tokens = 8;
  EXPECT_NE(refusal(prompt, group, other).find("segment_tokens 7, used under 8"), std::string::npos);
  other = tail;
  other.tail_tokens = 11;
  EXPECT_NE(refusal(prompt, group, other).find("tail_tokens 10, used under 11"), std::string::npos);
  core::data::PromptGroup changed = group;
  changed.prompt_ids[3] ^= 1;
  EXPECT_NE(refusal(prompt, changed, tail).find("other tokens"), std::string::npos);
  changed = group;
  changed.responses[1].completion_ids.resize(18, 1);
  EXPECT_NE(refusal(prompt, changed, tail).find("response 1 makes 42 tokens, captured for 25 to 41"), std::string::npos);
  EXPECT_THROW(prompt.sample(0, {.rollout = {.max_completion_length = 18}}), ConfigError);
  EXPECT_THROW(CapturedPrompt(*decoder_, {}, options_for(tail)), ConfigError);
  CapturedPrompt same(*decoder_, group.prompt_ids, options_for(tail));
  EXPECT_THROW(longstraw_gradient(*decoder_, {group, group}, {.longstraw = tail, .captured = {&same}}), ConfigError);
}

TEST_F(CapturedPrompts, HoldNoAdjointBetweenUses) {
  const Batch batch{group_of(32, 21)};
  for (const LongstrawConfig& arm : arms()) {
    CapturedPrompt prompt(*decoder_, batch[0].prompt_ids, options_for(arm));
    EXPECT_LE(prompt.state_bytes(), captured_bytes(*decoder_, kPrompt, arm));
    const StepGradient step = longstraw_gradient(*decoder_, batch, {.longstraw = arm, .captured = {&prompt}});
    EXPECT_GT(step.bytes.at("adjoint_bytes"), 0);
    EXPECT_EQ(prompt.capture().state.adjoint_bytes(), 0);
  }
}

}  // namespace
}  // namespace longstraw
