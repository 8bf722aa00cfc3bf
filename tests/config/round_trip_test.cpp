// load(dump(c)) == c for any configuration, with texts and numbers chosen to be awkward.

#include "app/config.h"
#include "core/config/load.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <cmath>

namespace longstraw::core::config {
namespace {

using app::RunConfig;

// Any finite double from its bits, subnormals and the largest too.
rc::Gen<double> any_finite() {
  return rc::gen::suchThat(
      rc::gen::map(rc::gen::arbitrary<std::uint64_t>(), [](std::uint64_t bits) { return std::bit_cast<double>(bits); }),
      [](double x) { return std::isfinite(x); });
}

rc::Gen<double> positive() {
  return rc::gen::suchThat(rc::gen::map(any_finite(), [](double x) { return std::abs(x); }), [](double x) { return x > 0; });
}

rc::Gen<std::string> text() {
  return rc::gen::oneOf(rc::gen::element<std::string>("", "null", "~", "true", "off", "8", "-1.5e3", "0x1F", "1:30", "a: b", "#",
                                                      "- x", "[", "{a}", "\"", "\\", "'", "a\nb\n", "\t", " lead", "trail ", "%",
                                                      "@x", "`", "!tag", "&a", "*a", "?", "Grüße", "提示", "..", ".", "./x",
                                                      "a:", "<<", "=", std::string("nul\0inside", 10), "\x01\x1f\x7f"),
                        rc::gen::container<std::string>(rc::gen::inRange<char>(0, 127)));
}

template <class E>
rc::Gen<E> any_of_enum() {
  return rc::gen::map(rc::gen::inRange<std::size_t>(0, names_of(E{}).size()), [](std::size_t i) { return names_of(E{})[i].value; });
}

template <class T>
rc::Gen<std::optional<T>> maybe(rc::Gen<T> inner) {
  return rc::gen::oneOf(rc::gen::just(std::optional<T>{}),
                        rc::gen::map(std::move(inner), [](T x) { return std::optional<T>(std::move(x)); }));
}

rc::Gen<std::int64_t> integer_from(std::int64_t least) {
  return rc::gen::map(rc::gen::arbitrary<std::int64_t>(), [least](std::int64_t x) { return std::max(least, x & INT64_MAX); });
}

RunConfig any_config() {
  RunConfig c;
  c.model.path = *text();
  c.model.dtype = *any_of_enum<model::Dtype>();
  c.model.device = *rc::gen::element<std::string>("cpu", "cuda", "cuda:0", "cuda:17");
  c.model.threads = *rc::gen::inRange<std::int64_t>(0, 4097);
  c.data.rollouts = *maybe(text());
  c.data.reward = *maybe(
      rc::gen::container<std::vector<std::string>>(rc::gen::map(text(), [](const std::string& s) { return "x" + s + ":f"; })));
  c.data.reward_timeout = *positive();
  c.data.reward_errors = *any_of_enum<data::RewardErrors>();
  c.rollout.num_generations = *integer_from(1);
  c.rollout.max_completion_length = *integer_from(1);
  c.rollout.temperature = *positive();
  c.rollout.top_k = *integer_from(0);
  c.rollout.top_p = *rc::gen::map(positive(), [](double x) { return std::min(x, 1.0); });
  c.rollout.seed = *rc::gen::arbitrary<std::uint64_t>();
  c.rollout.stop_token_ids = *maybe(rc::gen::container<std::vector<std::int64_t>>(integer_from(0)));
  c.objective.loss_type = *any_of_enum<objective::LossType>();
  c.objective.scale_rewards = *any_of_enum<objective::ScaleRewards>();
  c.objective.beta = *rc::gen::map(any_finite(), [](double x) { return std::abs(x); });
  c.objective.kl = *any_of_enum<objective::Kl>();
  c.objective.use_bias_correction_kl = *maybe(rc::gen::arbitrary<bool>());
  c.objective.epsilon_high = *maybe(positive());
  c.objective.delta = *maybe(positive());
  c.longstraw.prompt_gradient = *any_of_enum<PromptGradient>();
  c.longstraw.memory_budget = Bytes{*integer_from(0)};
  c.longstraw.self_check = *any_of_enum<SelfCheck>();
  c.reference.attention = *any_of_enum<reference::Attention>();
  return c;
}

RC_GTEST_PROP(RoundTrip, loading_what_was_dumped_gives_the_same_configuration, ()) {
  const RunConfig config = any_config();
  const std::string yaml = dump(config);
  RC_LOG(yaml);
  RC_ASSERT(load_text<RunConfig>(yaml, "dump") == config);
  RC_ASSERT(diff(load_text<RunConfig>(yaml, "dump"), config).empty());
}

RC_GTEST_PROP(RoundTrip, a_difference_in_any_generated_field_is_seen_in_the_dump, ()) {
  const RunConfig a = any_config(), b = any_config();
  RC_ASSERT((dump(a) == dump(b)) == (a == b));
  RC_ASSERT(diff(a, b).empty() == (a == b));
}

}  // namespace
}  // namespace longstraw::core::config
