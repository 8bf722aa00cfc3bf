#include "longstraw/token_loss.h"

#include "core/base/errors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace longstraw {
namespace {

using core::objective::Dialect;
using core::objective::Kl;
using core::objective::LossType;
using core::objective::ObjectiveConfig;

constexpr double kVerlKlInput = 20.0, kVerlKlOutput = 10.0;

double upper_epsilon(const ObjectiveConfig& config) { return config.epsilon_high.value_or(config.epsilon); }

LossTerm clipped_loss(const ObjectiveConfig& config, double ratio, double advantage) {
  const double low = 1.0 - config.epsilon, high = 1.0 + upper_epsilon(config);
  const bool capped = config.delta && ratio > *config.delta;
  const double plain = (capped ? *config.delta : ratio) * advantage;
  const double clipped = std::clamp(ratio, low, high) * advantage;
  const bool plain_counts = plain <= clipped;
  const bool flows = plain_counts ? !capped : ratio >= low && ratio <= high;
  LossTerm loss{-(plain_counts ? plain : clipped), flows ? -ratio * advantage : 0.0};
  if (config.clip_ratio_c && advantage < 0.0 && -*config.clip_ratio_c * advantage < loss.value) {
    loss = {-*config.clip_ratio_c * advantage, 0.0};
  }
  return loss;
}

// −σ(τ(r−1)) · 4/τ · A
LossTerm soft_gate_loss(const ObjectiveConfig& config, double ratio, double advantage) {
  const double tau = advantage > 0.0 ? config.sapo_temperature_pos : config.sapo_temperature_neg;
  const double gate = 1.0 / (1.0 + std::exp(-tau * (ratio - 1.0)));
  return {-gate * 4.0 / tau * advantage, -4.0 * gate * (1.0 - gate) * ratio * advantage};
}

}  // namespace

LossTerm ratio_loss(const ObjectiveConfig& config, double log_ratio, double advantage) {
  if (advantage == 0.0) return {};
  const double ratio = std::exp(log_ratio);
  return config.loss_type == LossType::kSapo ? soft_gate_loss(config, ratio, advantage) : clipped_loss(config, ratio, advantage);
}

double cispo_weight(const ObjectiveConfig& config, double log_ratio) {
  const double ratio = std::exp(log_ratio);
  return config.dialect == Dialect::kTrl ? std::min(ratio, upper_epsilon(config))
                                         : std::clamp(ratio, 1.0 - config.epsilon, 1.0 + upper_epsilon(config));
}

LossTerm kl_loss(const ObjectiveConfig& config, double logprob, double reference) {
  const double above = logprob - reference;
  if (config.kl == Kl::kK1) return {above, 1.0};
  if (config.kl == Kl::kK2) return {0.5 * above * above, above};
  if (config.dialect == Dialect::kTrl) return {std::exp(-above) + above - 1.0, 1.0 - std::exp(-above)};
  const double bounded = std::clamp(-above, -kVerlKlInput, kVerlKlInput);
  const double value = std::exp(bounded) - bounded - 1.0;
  const bool flows = bounded == -above && value <= kVerlKlOutput;
  return {std::min(value, kVerlKlOutput), flows ? 1.0 - std::exp(bounded) : 0.0};
}

bool corrects_kl(const ObjectiveConfig& config) {
  if (config.beta == 0.0 || config.kl_in != core::objective::KlPlace::kLoss) return false;
  return config.use_bias_correction_kl.value_or(config.dialect == Dialect::kTrl && config.kl == Kl::kK3);
}

bool counts(const core::data::Response& response, int64_t index) {
  return !response.completion_mask || (*response.completion_mask)[index] != 0;
}

int64_t counted_tokens(const core::data::Response& response) {
  const auto length = static_cast<int64_t>(response.completion_ids.size());
  if (!response.completion_mask) return length;
  return std::count_if(response.completion_mask->begin(), response.completion_mask->end(), [](auto m) { return m != 0; });
}

void require_reference(const core::data::PromptGroup& group, const core::data::Response& response, const ObjectiveConfig& config) {
  if (config.beta > 0.0 && !response.ref_logprobs) {
    throw ConfigError(
        fmt::format("objective.beta is {}, but prompt {} has a response without ref_logprobs", config.beta, group.prompt_id));
  }
}

namespace {

const std::vector<double>& scored(const char* what, const core::data::Batch& batch,
                                  const std::vector<std::vector<std::vector<double>>>& scores, size_t prompt, size_t member) {
  const size_t wanted = batch[prompt].responses[member].completion_ids.size();
  const bool there = prompt < scores.size() && member < scores[prompt].size();
  if (there && scores[prompt][member].size() == wanted) return scores[prompt][member];
  throw ConfigError(fmt::format("the objective needs a scoring pass: prompt {}, response {}: got {} {}, wanted {}",
                                batch[prompt].prompt_id, member, there ? scores[prompt][member].size() : 0, what, wanted));
}

}  // namespace

const std::vector<double>& scored_logprobs(const core::data::Batch& batch, const core::model::TokenScores& scores, size_t prompt,
                                           size_t member) {
  return scored("log-probs", batch, scores.logprobs, prompt, member);
}

const std::vector<double>& scored_entropies(const core::data::Batch& batch, const core::model::TokenScores& scores, size_t prompt,
                                            size_t member) {
  return scored("entropies", batch, scores.entropies, prompt, member);
}

bool has_one_loss(LossType type) { return type == LossType::kGmpo || type == LossType::kRloo; }

bool is_coupled(const ObjectiveConfig& config) {
  return config.loss_type == LossType::kGspo || has_one_loss(config.loss_type) ||
         config.importance_sampling_level == core::objective::ImportanceSamplingLevel::kSequence;
}

bool pulls_at_own(const ObjectiveConfig& config) { return config.dialect == Dialect::kVerl && config.loss_type == LossType::kGspo; }

bool kl_is_coupled(const ObjectiveConfig& config) {
  return corrects_kl(config) && is_coupled(config) && !has_one_loss(config.loss_type) && !pulls_at_own(config);
}

}  // namespace longstraw
