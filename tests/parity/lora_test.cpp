// Gradients of low-rank adapters: LongStraw's arms against the reference with the prompt whole (exact) or cut (detached, tail), for
// every family, in float64.
#include "core/model/lora.h"

#include "longstraw/trainer.h"
#include "reference/gradient.h"
#include "tests/support/closeness.h"
#include "tests/support/families.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>

namespace longstraw {
namespace {

using core::data::Batch;
using core::model::Decoder;
using core::model::LoraConfig;
using core::model::StepGradient;

constexpr double kWhole = 1e-12;  // DESIGN 9, float64
constexpr double kParameter = 1e-10;

// Every A and B of the size of a weight's entries: both have a gradient.
std::unique_ptr<Decoder> adapted(const nlohmann::json& config, const LoraConfig& lora, uint64_t seed) {
  auto decoder = test::tiny_decoder(config, at::kDouble, seed);
  core::model::add_lora(*decoder, lora);
  at::manual_seed(seed);
  const at::NoGradGuard no_grad;
  for (const auto& parameter : decoder->parameters()) parameter->value.normal_(0.0, 0.3);
  return decoder;
}

// Every linear layer, those too that all-linear leaves out because PEFT would not load them.
std::vector<std::string> every_linear_layer(const nlohmann::json& config) {
  std::vector<std::string> targets{"all-linear"};
  const auto decoder = test::tiny_decoder(config, at::kDouble);
  for (const std::string kind : {"out_proj", "gate_proj", "up_proj", "down_proj"}) {
    const auto& weights = decoder->weights();
    const bool has = std::any_of(weights.begin(), weights.end(), [&](const auto& weight) {
      return weight->name.ends_with("." + kind + ".weight") && weight->name.find(".experts.") == std::string::npos;
    });
    if (has) targets.push_back(kind);
  }
  return targets;
}

Batch random_batch(int64_t vocab, int64_t prompt, const std::vector<int64_t>& lengths, uint64_t seed) {
  Batch batch{test::random_group(vocab, prompt, lengths, seed)};
  for (size_t m = 0; m < batch[0].responses.size(); ++m) batch[0].responses[m].reward = double(m % 3);
  return batch;
}

StepGradient longstraw_step(const Decoder& decoder, const Batch& batch, const LongstrawConfig& config) {
  return longstraw_gradient(decoder, batch, {.longstraw = config});
}

StepGradient reference_step(const Decoder& decoder, const Batch& batch, const LongstrawConfig& config) {
  reference::ReferenceOptions options;
  if (config.prompt_gradient == PromptGradient::kDetached) options.run.tail_tokens = 0;
  if (config.prompt_gradient == PromptGradient::kTail) options.run.tail_tokens = config.tail_tokens;
  return reference::reference_gradient(decoder, batch, options);
}

double norm_of(const std::vector<at::Tensor>& gradients) {
  double norm = 0.0;
  for (const at::Tensor& gradient : gradients) norm = std::hypot(norm, gradient.norm().item<double>());
  return norm;
}

void expect_same(const Decoder& decoder, const StepGradient& got, const StepGradient& wanted, const std::string& what) {
  ASSERT_GT(norm_of(wanted.gradients), 0.0) << what;
  // A gradient that is a sum which cancels is judged by the whole alone.
  const auto error = test::gradient_error(decoder, got.gradients, wanted.gradients, 1e-6);
  EXPECT_LE(error.whole, kWhole) << what;
  EXPECT_LE(error.worst, kParameter) << what << " " << error.worst_parameter;
  EXPECT_EQ(got.facts.at("recompute_mismatches"), 0.0) << what;
}

class LoraOfFamily : public testing::TestWithParam<test::Family> {};

TEST_P(LoraOfFamily, EveryArmGivesTheReferencesGradientOfTheAdapters) {
  const int64_t vocab = GetParam().config["vocab_size"];
  LoraConfig lora;
  lora.r = 3;
  lora.lora_alpha = 4.0;
  lora.target_modules = every_linear_layer(GetParam().config);
  const auto decoder = adapted(GetParam().config, lora, 1);
  const Batch batch = random_batch(vocab, 19, {5, 1, 8}, 2);
  double exact = 0.0, detached = 0.0;
  for (const PromptGradient kept : {PromptGradient::kExact, PromptGradient::kDetached, PromptGradient::kTail}) {
    LongstrawConfig config;
    config.prompt_gradient = kept;
    config.tail_tokens = 6;
    config.segment_tokens = 7;
    config.replay_batch = 2;
    for (const int64_t budget : {int64_t{0}, int64_t{1} << 30}) {
      config.memory_budget = {budget};
      const StepGradient got = longstraw_step(*decoder, batch, config), wanted = reference_step(*decoder, batch, config);
      expect_same(*decoder, got, wanted, GetParam().name + " " + std::string(core::config::name_of(kept)));
      if (kept == PromptGradient::kExact) exact = norm_of(wanted.gradients);
      if (kept == PromptGradient::kDetached) detached = norm_of(wanted.gradients);
    }
  }
  // The arms are not the same thing by another name.
  EXPECT_GT(std::abs(exact - detached), 1e-6 * exact);
}

INSTANTIATE_TEST_SUITE_P(Families, LoraOfFamily, testing::ValuesIn(test::small_families()),
                         [](const auto& info) { return info.param.name; });

// Whichever layers have adapters: a graph begins where the first of them is, and what lies below has none.
RC_GTEST_PROP(Lora, AnyTargetsAndAnySegmentsGiveTheReferencesGradient, ()) {
  static const auto families = test::small_families();
  const auto& family = families[*rc::gen::inRange<size_t>(0, families.size())];
  LoraConfig lora;
  lora.r = *rc::gen::inRange<int64_t>(1, 5);
  lora.target_modules = every_linear_layer(family.config);
  auto decoder = adapted(family.config, lora, 3);
  std::vector<std::string> modules;
  for (const auto& parameter : decoder->parameters()) {
    const std::string& name = parameter->name;
    const size_t begin = std::string("base_model.model.").size(), end = name.find(".lora_A.weight");
    if (end != std::string::npos) modules.push_back(name.substr(begin, end - begin));
  }
  const auto some = *rc::gen::inRange<size_t>(1, 4);
  lora.target_modules.clear();
  for (size_t i = 0; i < some; ++i) lora.target_modules.push_back(modules[*rc::gen::inRange<size_t>(0, modules.size())]);
  decoder = adapted(family.config, lora, *rc::gen::inRange<uint64_t>(0, 100));

  std::vector<int64_t> lengths;
  for (int64_t m = *rc::gen::inRange(1, 5); m > 0; --m) lengths.push_back(*rc::gen::inRange<int64_t>(1, 10));
  lengths.push_back(3);  // at least two members: one alone has no advantage
  const Batch batch =
      random_batch(family.config["vocab_size"], *rc::gen::inRange<int64_t>(1, 27), lengths, *rc::gen::inRange<uint64_t>(0, 1000));
  LongstrawConfig config;
  config.prompt_gradient = *rc::gen::element(PromptGradient::kExact, PromptGradient::kDetached, PromptGradient::kTail);
  config.tail_tokens = *rc::gen::inRange<int64_t>(0, 20);
  config.segment_tokens = *rc::gen::inRange<int64_t>(1, 30);
  config.replay_batch = *rc::gen::inRange<int64_t>(1, 4);
  config.memory_budget = {*rc::gen::element<int64_t>(0, 400 << 10, 1 << 30)};
  const StepGradient got = longstraw_step(*decoder, batch, config), wanted = reference_step(*decoder, batch, config);
  const auto error = test::gradient_error(*decoder, got.gradients, wanted.gradients, 1e-6);
  RC_LOG() << family.name << " " << testing::PrintToString(lora.target_modules) << " whole " << error.whole << " worst "
           << error.worst << " " << error.worst_parameter << "\n";
  RC_ASSERT(error.whole <= kWhole);
  RC_ASSERT(error.worst <= kParameter);
}

// The frozen base as reference model and the adapted policy are two models to the prompt's state and to the gradient.
TEST(Lora, LogProbsWithoutAdaptersAreTheBases) {
  LoraConfig lora;
  lora.r = 2;
  const auto base = test::tiny_decoder(test::tiny_config(), at::kDouble, 1);
  const auto policy = adapted(test::tiny_config(), lora, 1);
  const Batch batch = random_batch(32, 11, {4, 6}, 5);
  const auto wanted = longstraw_step(*base, batch, {}).logprobs;
  EXPECT_NE(longstraw_step(*policy, batch, {}).logprobs, wanted);
  const core::model::WithoutAdapters without(*policy);
  reference::RunOptions options;
  const at::NoGradGuard no_grad;
  const auto& group = batch[0];
  for (size_t m = 0; m < group.responses.size(); ++m) {
    const auto& ids = group.responses[m].completion_ids;
    EXPECT_TRUE(at::equal(reference::response_logits(*policy, group.prompt_ids, ids, {15, 17}, options),
                          reference::response_logits(*base, group.prompt_ids, ids, {15, 17}, options)));
  }
}

}  // namespace
}  // namespace longstraw
