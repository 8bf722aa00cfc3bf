// The streaming objective against the reference's batch formula with autograd, over all that can be configured: the two were
// written apart and share no code.
#include "longstraw/objective.h"

#include "core/base/errors.h"
#include "core/config/load.h"
#include "reference/objective.h"
#include "tests/longstraw/random_step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <optional>

namespace longstraw {
namespace {

using namespace core::objective;
using test::Step;

constexpr int64_t kMaxLength = 9;

template <class T>
T any_of(std::vector<T> values) {
  return *rc::gen::elementOf(std::move(values));
}

template <class Enum>
Enum any_named() {
  std::vector<Enum> values;
  for (const auto& named : names_of(Enum{})) values.push_back(named.value);
  return any_of(values);
}

template <class T>
std::optional<T> perhaps(T value) {
  return *rc::gen::inRange(0, 3) == 0 ? std::optional(value) : std::nullopt;
}

// Every key, the defaults often: most combinations have a meaning.
ObjectiveConfig any_config() {
  ObjectiveConfig config;
  config.loss_type = any_named<LossType>();
  config.dialect = any_named<Dialect>();
  config.aggregation = perhaps(any_named<Aggregation>());
  config.importance_sampling_level = any_of<ImportanceSamplingLevel>(
      {ImportanceSamplingLevel::kToken, ImportanceSamplingLevel::kToken, ImportanceSamplingLevel::kSequence});
  config.epsilon_high = perhaps(0.3);
  config.delta = perhaps(1.4);
  config.clip_ratio_c = perhaps(1.3);
  config.advantage_estimator = any_named<AdvantageEstimator>();
  config.scale_rewards = any_named<ScaleRewards>();
  config.multi_objective_aggregation = any_of<RewardAggregation>(
      {RewardAggregation::kSumThenNormalize, RewardAggregation::kSumThenNormalize, RewardAggregation::kNormalizeThenSum});
  config.beta = any_of<double>({0.0, 0.2});
  config.kl = any_named<Kl>();
  config.kl_in = any_of<KlPlace>({KlPlace::kLoss, KlPlace::kLoss, KlPlace::kReward});
  config.use_bias_correction_kl = any_of<std::optional<bool>>({std::nullopt, true, false});
  config.entropy_coef = any_of<double>({0.0, 0.1});
  config.top_entropy_quantile = any_of<double>({1.0, 1.0, 0.45});
  config.importance_sampling_correction = any_named<SamplerCorrection>();
  config.importance_sampling_cap = 1.25;
  config.importance_sampling_min = any_of<double>({0.0, 0.8});
  try {
    check_objective(config);
  } catch (const ConfigError&) {  // these are what most refusals are about
    config.delta.reset(), config.clip_ratio_c.reset(), config.aggregation.reset();
    config.importance_sampling_level = ImportanceSamplingLevel::kToken;
  }
  return config;
}

struct Distance {
  double squares = 0.0, norm = 0.0;
  void add(double got, double wanted) { squares += std::pow(got - wanted, 2), norm += std::pow(wanted, 2); }
  double relative() const { return std::sqrt(squares) / std::max(std::sqrt(norm), 1.0); }
};

// The reference's loss and derivatives of one response.
struct Share {
  double loss = 0.0;
  at::Tensor by_logprob, by_entropy;
};

Share reference_share(const reference::BatchObjective& objective, const Step& step, size_t p, size_t m) {
  const auto leaf = [](const std::vector<double>& values) { return at::tensor(values, at::kDouble).set_requires_grad(true); };
  const at::Tensor logprobs = leaf(step.scores.logprobs[p][m]), entropies = leaf(step.scores.entropies[p][m]);
  const auto share = objective.share(p, m, logprobs, entropies);
  // The zeros tie every input to the loss, so that autograd has a gradient for each.
  at::Tensor loss = share.policy + 0.0 * logprobs.sum() + 0.0 * entropies.sum();
  if (share.kl.defined()) loss = loss + share.kl;
  if (share.entropy.defined()) loss = loss + share.entropy;
  const auto gradients = torch::autograd::grad({loss}, {logprobs, entropies});
  return {loss.item<double>(), gradients[0], gradients[1]};
}

// Whether the streaming objective takes the configuration; then it must give what the reference gives.
bool agrees_or_refuses(const Step& step, const ObjectiveConfig& config) {
  std::optional<GrpoObjective> streaming;
  try {
    streaming.emplace(step.batch, config, 1.0, kMaxLength, step.scores);
  } catch (const ConfigError&) {
    return false;
  }
  const reference::BatchObjective batch(step.batch, config, kMaxLength, step.scores);
  Distance of_advantages, of_logprobs, of_entropies;
  double loss = 0.0, wanted_loss = 0.0, size = 0.0;
  for (size_t p = 0; p < step.batch.size(); ++p) {
    for (size_t m = 0; m < step.batch[p].responses.size(); ++m) {
      const Share wanted = reference_share(batch, step, p, m);
      of_advantages.add(streaming->advantages()[p][m], batch.advantages()[p][m]);
      wanted_loss += wanted.loss;
      for (size_t t = 0; t < step.scores.logprobs[p][m].size(); ++t) {
        const TokenLoss token = streaming->token(p, m, t, step.scores.logprobs[p][m][t], step.scores.entropies[p][m][t]);
        loss += token.policy + token.kl + token.entropy;
        size += std::abs(token.policy) + std::abs(token.kl) + std::abs(token.entropy);
        of_logprobs.add(token.derivative, wanted.by_logprob[int64_t(t)].item<double>());
        of_entropies.add(token.entropy_derivative, wanted.by_entropy[int64_t(t)].item<double>());
      }
    }
  }
  // Some hundred operations in float64, and cancellation in (reward - mean): as ROUNDING of fixtures/objective_cases.py.
  constexpr double kRounding = 1e-13;
  RC_ASSERT(of_advantages.relative() <= kRounding);
  RC_ASSERT(of_logprobs.relative() <= kRounding);
  RC_ASSERT(of_entropies.relative() <= kRounding);
  RC_ASSERT(std::abs(loss - wanted_loss) <= kRounding * (1.0 + size));
  return true;
}

RC_GTEST_PROP(ObjectiveArms, AgreeOnAllThatCanBeConfigured, ()) {
  const ObjectiveConfig config = any_config();
  const Step step = test::random_step(*rc::gen::inRange<uint64_t>(0, 100000), {.prompts = *rc::gen::inRange(1, 4),
                                                                               .members = *rc::gen::inRange(1, 5),
                                                                               .old = *rc::gen::inRange(0, 3) != 0,
                                                                               .given_advantages = *rc::gen::inRange(0, 4) == 0,
                                                                               .spread = any_of<double>({0.5, 0.5, 3.0}),
                                                                               .parts = any_of<int>({0, 3})});
  RC_LOG() << core::config::dump(config);
  const bool taken = agrees_or_refuses(step, config);
  RC_TAG(taken ? "compared" : "refused");
}

}  // namespace
}  // namespace longstraw
