// Whatever the batch and however it is cut, LongStraw's arms give the gradients of the reference with the prompt whole
// (exact) or cut (detached, tail), in float64.
#include "longstraw/trainer.h"

#include "reference/gradient.h"
#include "tests/support/closeness.h"
#include "tests/support/families.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <map>
#include <set>

namespace longstraw {
namespace {

using core::data::Batch;
using core::data::PromptGroup;
using core::objective::ObjectiveConfig;

constexpr int64_t kVocab = 32;
constexpr double kWhole = 1e-12;  // DESIGN 9, float64
constexpr double kParameter = 1e-10;
// Of a parameter whose gradient all but cancels, one rounding (2^-52) of the whole's norm is more than kParameter.
constexpr double kFloor = 2.2204460492503131e-16 / kParameter;

struct Case {
  nlohmann::json model;
  Batch batch;
  ObjectiveConfig objective;
  LongstrawConfig longstraw;
  double temperature = 1.0;
};

template <class T>
T pick(std::initializer_list<T> choices) {
  return *rc::gen::elementOf(std::vector<T>(choices));
}
int64_t between(int64_t low, int64_t high) { return *rc::gen::inRange(low, high + 1); }

std::vector<double> numbers(int64_t count, double low, double high) {
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(low + (high - low) * static_cast<double>(between(0, 1000)) / 1000.0);
  return values;
}

std::vector<int64_t> ids(int64_t count) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(between(0, kVocab - 1));
  return values;
}

core::data::Response response(const ObjectiveConfig& objective) {
  core::data::Response r;
  const int64_t length = pick<int64_t>({1, 1, 2, 3, 5, 9, 14});
  r.completion_ids = ids(length);
  r.reward = pick({0.0, 0.0, 1.0, 0.25, -3.0});
  if (between(0, 5) == 0) r.reward.reset();  // a reward function that had nothing to say
  if (between(0, 2) == 0) r.old_logprobs = numbers(length, -5.0, -1.0);
  if (objective.beta > 0.0) r.ref_logprobs = numbers(length, -5.0, -1.0);
  if (between(0, 2) == 0) {
    r.completion_mask.emplace();
    for (int64_t i = 0; i < length; ++i) r.completion_mask->push_back(static_cast<uint8_t>(between(0, 3) > 0));
  }
  return r;
}

// Prompts that are new, equal to an earlier one, share a beginning with it, or are its beginning.
std::vector<int64_t> prompt(const Batch& earlier) {
  const int64_t fresh = pick<int64_t>({1, 2, 3, 7, 12, 19, 26});
  if (earlier.empty() || between(0, 2) == 0) return ids(fresh);
  const auto& other = earlier[between(0, static_cast<int64_t>(earlier.size()) - 1)].prompt_ids;
  std::vector<int64_t> shared(other.begin(), other.begin() + between(1, static_cast<int64_t>(other.size())));
  if (between(0, 1) == 0) {
    const auto more = ids(pick<int64_t>({1, 4, 9}));
    shared.insert(shared.end(), more.begin(), more.end());
  }
  return shared;
}

// Dense models with edges that the goldens have not.
nlohmann::json dense_model() {
  return test::tiny_config(pick<nlohmann::json>(
      {nlohmann::json::object(),
       {{"tie_word_embeddings", true}},
       {{"attention_bias", true}, {"mlp_bias", true}, {"num_hidden_layers", 1}},
       {{"model_type", "mistral"}, {"sliding_window", 5}},
       {{"model_type", "mistral"}, {"sliding_window", 1}},
       {{"model_type", "qwen2"}, {"use_sliding_window", true}, {"sliding_window", 4}, {"max_window_layers", 1}},
       {{"model_type", "qwen3"}, {"num_hidden_layers", 3}}}));
}

// Any of the goldens' models.
nlohmann::json family_model() {
  static const auto families = test::small_families();
  return families[between(0, static_cast<int64_t>(families.size()) - 1)].config;
}

Case random_case(const nlohmann::json& model) {
  using namespace core::objective;
  Case c;
  c.model = model;
  auto& o = c.objective;
  o.loss_type = pick({LossType::kGrpo, LossType::kDrGrpo, LossType::kDapo, LossType::kBnpo});
  o.scale_rewards = pick({ScaleRewards::kGroup, ScaleRewards::kBatch, ScaleRewards::kNone});
  o.beta = pick({0.0, 0.0, 0.3});
  o.kl = pick({Kl::kK1, Kl::kK2, Kl::kK3});
  if (between(0, 2) == 0) o.epsilon_high = 0.4;
  if (between(0, 3) == 0) o.delta = 1.5;
  const int64_t prompts = pick<int64_t>({1, 1, 2, 3});
  for (int64_t p = 0; p < prompts; ++p) {
    PromptGroup group{"p" + std::to_string(p), prompt(c.batch), {}};
    const int64_t members = pick<int64_t>({1, 2, 3, 4, 8, 16});
    for (int64_t m = 0; m < members; ++m) group.responses.push_back(response(o));
    c.batch.push_back(std::move(group));
  }
  auto& l = c.longstraw;
  l.prompt_gradient = pick({PromptGradient::kExact, PromptGradient::kExact, PromptGradient::kDetached, PromptGradient::kTail});
  l.tail_tokens = pick<int64_t>({0, 1, 3, 8, 40});
  l.segment_tokens = pick<int64_t>({1, 2, 3, 5, 8, 13, 26, 100});
  l.replay_batch = pick<int64_t>({1, 2, 3, 16});
  l.memory_budget = {pick<int64_t>({0, 400 << 10, 600 << 10, 800 << 10, int64_t{1} << 30})};
  c.temperature = pick({1.0, 0.7});
  return c;
}

core::model::StepGradient longstraw_step(const core::model::Decoder& decoder, const Case& c) {
  return longstraw_gradient(
      decoder, c.batch,
      {.longstraw = c.longstraw, .objective = c.objective, .temperature = c.temperature, .max_completion_length = 14});
}

core::model::StepGradient reference_step(const core::model::Decoder& decoder, const Case& c) {
  reference::ReferenceOptions options{.objective = c.objective, .temperature = c.temperature, .max_completion_length = 14};
  if (c.longstraw.prompt_gradient == PromptGradient::kDetached) options.run.tail_tokens = 0;
  if (c.longstraw.prompt_gradient == PromptGradient::kTail) options.run.tail_tokens = c.longstraw.tail_tokens;
  return reference::reference_gradient(decoder, c.batch, options);
}

// The largest errors that the properties met, by family.
std::map<std::string, test::GradientError>& worst_by_family() {
  static std::map<std::string, test::GradientError> worst;
  return worst;
}

void expect_references_gradient(const Case& c) {
  const auto decoder = test::tiny_decoder(c.model, at::kDouble);
  const auto wanted = reference_step(*decoder, c);
  const auto got = longstraw_step(*decoder, c);
  const auto error = test::gradient_error(*decoder, got.gradients, wanted.gradients, kFloor);
  RC_LOG() << c.model.dump() << " segment " << c.longstraw.segment_tokens << " batch " << c.longstraw.replay_batch << " arm "
           << int(c.longstraw.prompt_gradient) << " tail " << c.longstraw.tail_tokens << " budget "
           << c.longstraw.memory_budget.count << " worst " << error.worst_parameter << " " << error.worst << " whole "
           << error.whole << "\n";
  RC_ASSERT(error.whole <= kWhole);
  RC_ASSERT(error.worst <= kParameter);
  RC_ASSERT(std::abs(got.loss - wanted.loss) <= 1e-12 * (1.0 + std::abs(wanted.loss)));
  RC_ASSERT(got.facts.at("recompute_mismatches") == 0);
  RC_ASSERT(got.facts.at("changed_choices") == 0);
  for (size_t p = 0; p < c.batch.size(); ++p) {
    for (size_t m = 0; m < c.batch[p].responses.size(); ++m) {
      RC_ASSERT(std::abs(got.advantages[p][m] - wanted.advantages[p][m]) <= 1e-12 * (1.0 + std::abs(wanted.advantages[p][m])));
      for (size_t t = 0; t < got.logprobs[p][m].size(); ++t) {
        RC_ASSERT(std::abs(got.logprobs[p][m][t] - wanted.logprobs[p][m][t]) <= 1e-11);
      }
    }
  }
  auto& worst = worst_by_family()[c.model.at("model_type")];
  worst.whole = std::max(worst.whole, error.whole);
  if (error.worst >= worst.worst) {
    worst.worst = error.worst;
    worst.worst_parameter = error.worst_parameter;
  }
}

RC_GTEST_PROP(ArmsProperty, GradientsAreTheReferencesInFloat64, ()) { expect_references_gradient(random_case(dense_model())); }
// Twice as many cases, for there are twice as many kinds of layers.
RC_GTEST_PROP(ArmsProperty, GradientsOfAnyFamilyAreTheReferencesInFloat64, ()) {
  expect_references_gradient(random_case(family_model()));
  expect_references_gradient(random_case(family_model()));
}

// How a step is carried out changes no more than the order of sums.
RC_GTEST_PROP(ArmsProperty, SegmentsReplayBatchesAndBudgetsDoNotMatter, ()) {
  Case c = random_case(between(0, 1) == 0 ? dense_model() : family_model());
  const auto decoder = test::tiny_decoder(c.model, at::kDouble);
  const auto one = longstraw_step(*decoder, c);
  c.longstraw.segment_tokens = pick<int64_t>({1, 4, 9, 100});
  c.longstraw.replay_batch = pick<int64_t>({1, 5});
  c.longstraw.memory_budget = {pick<int64_t>({0, int64_t{1} << 30})};
  const auto other = longstraw_step(*decoder, c);
  const auto error = test::gradient_error(*decoder, other.gradients, one.gradients, kFloor);
  RC_LOG() << c.model.dump() << " arm " << int(c.longstraw.prompt_gradient) << " worst " << error.worst_parameter << " "
           << error.worst << " whole " << error.whole << "\n";
  RC_ASSERT(error.whole <= kWhole);
  RC_ASSERT(error.worst <= kParameter);
}

TEST(ArmsProperty, ZZWorstValuesMet) {
  printf("    worst over the properties' cases (bounds %.0e and %.0e):\n", kWhole, kParameter);
  for (const auto& [family, error] : worst_by_family()) {
    printf("    %-18s whole %.2e, one parameter %.2e %s\n", family.c_str(), error.whole, error.worst,
           error.worst_parameter.c_str());
    EXPECT_GT(error.whole, 0.0);  // the properties did compare something
  }
  std::set<std::string> wanted;
  for (const auto& family : test::small_families()) wanted.insert(family.config.at("model_type"));
  for (const auto& family : wanted) EXPECT_TRUE(worst_by_family().contains(family)) << family;
}

// Negative control: the arms differ from each other by far more than any bound above.
TEST(ArmsProperty, ArmsAreFarApart) {
  Case c;
  c.model = test::tiny_config();
  c.batch = {test::random_group(kVocab, 20, {5, 9}, 3)};
  c.batch[0].responses[0].reward = 1.0;
  c.batch[0].responses[1].reward = 0.0;
  const auto decoder = test::tiny_decoder(c.model, at::kDouble);
  const auto exact = longstraw_step(*decoder, c);
  c.longstraw.prompt_gradient = PromptGradient::kTail;
  c.longstraw.tail_tokens = 6;
  const auto tail = longstraw_step(*decoder, c);
  c.longstraw.prompt_gradient = PromptGradient::kDetached;
  const auto detached = longstraw_step(*decoder, c);
  EXPECT_GT(test::gradient_error(*decoder, detached.gradients, exact.gradients).whole, 1e-2);
  EXPECT_GT(test::gradient_error(*decoder, tail.gradients, exact.gradients).whole, 1e-3);
  EXPECT_GT(test::gradient_error(*decoder, tail.gradients, detached.gradients).whole, 1e-3);
}

}  // namespace
}  // namespace longstraw
