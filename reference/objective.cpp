#include "reference/objective.h"

#include "core/base/errors.h"
#include "reference/token_loss.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace longstraw::reference {

using core::data::Batch;
using core::data::PromptGroup;
using core::data::Response;
using core::model::TokenScores;
using core::objective::Aggregation;
using core::objective::Dialect;
using core::objective::KlPlace;
using core::objective::LossType;
using core::objective::ObjectiveConfig;
using core::objective::SamplerCorrection;

namespace {

Aggregation aggregation_of(const ObjectiveConfig& config) {
  if (config.aggregation) return *config.aggregation;
  switch (config.loss_type) {
    case LossType::kGrpo:
    case LossType::kGspo:
    case LossType::kSapo:
    case LossType::kGmpo:
    case LossType::kRloo: return Aggregation::kSeqMeanTokenMean;
    case LossType::kDapo:
    case LossType::kBnpo:
    case LossType::kCispo: return Aggregation::kTokenMean;
    case LossType::kDrGrpo: return Aggregation::kSeqMeanTokenSumNorm;
    case LossType::kReinforce: return Aggregation::kSeqMeanTokenSum;
  }
  throw ConfigError("objective.loss_type: unknown");
}

bool kl_in_loss(const ObjectiveConfig& config) { return config.beta > 0 && config.kl_in == KlPlace::kLoss; }

double total(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

void check_defined(const ObjectiveConfig& config) {
  if (config.loss_type == LossType::kGmpo && config.importance_sampling_correction == SamplerCorrection::kTokenMask) {
    throw ConfigError(
        "objective.importance_sampling_correction: token_mask is not defined for gmpo, whose loss is one of the whole response");
  }
}

}  // namespace

bool needs_scores_first(const Batch& batch, const ObjectiveConfig& config) {
  if (config.top_entropy_quantile < 1) return true;
  if (config.kl_in != KlPlace::kReward || config.beta == 0) return false;
  return std::any_of(batch.begin(), batch.end(), [](const PromptGroup& group) {
    return std::any_of(group.responses.begin(), group.responses.end(),
                       [](const Response& response) { return !response.old_logprobs && !response.advantage; });
  });
}

BatchObjective::BatchObjective(const Batch& batch, const ObjectiveConfig& config, int64_t max_completion_length,
                               const TokenScores& scores)
    : batch_(batch),
      config_(config),
      max_completion_length_(double(max_completion_length)),
      advantages_(reference::advantages(batch, config, scores)) {
  check_defined(config);
  for (const PromptGroup& group : batch) {
    auto& row = selected_.emplace_back();
    for (size_t member = 0; member < group.responses.size(); ++member) {
      const Response& response = group.responses[member];
      row.push_back(token_mask(response));
      responses_ += 1;
      tokens_ += total(row.back());
      if (kl_in_loss(config) && !response.ref_logprobs) {
        throw ConfigError(fmt::format("objective.beta: {} needs ref_logprobs of every response; prompt {} response {} has none",
                                      config.beta, group.prompt_id, member));
      }
    }
  }
  if (config.top_entropy_quantile < 1) find_selected_tokens(scores);
  for (const auto& group : selected_) {
    for (const auto& row : group) selected_tokens_ += total(row);
  }
}

void BatchObjective::find_selected_tokens(const TokenScores& scores) {
  std::vector<double> entropies;
  const auto each_counted_token = [&](const auto& action) {
    for (size_t prompt = 0; prompt < selected_.size(); ++prompt) {
      for (size_t member = 0; member < selected_[prompt].size(); ++member) {
        auto& row = selected_[prompt][member];
        for (size_t t = 0; t < row.size(); ++t) {
          if (row[t] != 0.0) action(row[t], scores.entropies.at(prompt).at(member).at(t));
        }
      }
    }
  };
  if (scores.entropies.empty()) throw ConfigError("objective.top_entropy_quantile: needs the entropies of a scoring pass");
  each_counted_token([&](double, double entropy) { entropies.push_back(entropy); });
  if (entropies.empty()) return;
  const at::Tensor all = at::tensor(at::ArrayRef<double>(entropies), at::kDouble);
  const double threshold = at::quantile(all, 1 - config_.top_entropy_quantile).item<double>();
  each_counted_token([&](double& selected, double entropy) { selected = entropy >= threshold ? 1.0 : 0.0; });
}

double BatchObjective::denominator(double own_tokens) const {
  switch (aggregation_of(config_)) {
    case Aggregation::kSeqMeanTokenMean: return responses_ * std::max(own_tokens, 1.0);
    case Aggregation::kTokenMean: return std::max(tokens_, 1.0);
    case Aggregation::kSeqMeanTokenSum: return responses_;
    case Aggregation::kSeqMeanTokenSumNorm: return responses_ * max_completion_length_;
  }
  throw ConfigError("objective.aggregation: unknown");
}

bool BatchObjective::has_gradient(size_t prompt, size_t member) const {
  return advantages_.at(prompt).at(member) != 0.0 || kl_in_loss(config_) || wants_entropy();
}

BatchObjective::Share BatchObjective::share(size_t prompt, size_t member, const at::Tensor& logprobs_R,
                                            const at::Tensor& entropies_R) const {
  const Response& response = batch_.at(prompt).responses.at(member);
  const std::vector<double> mask = token_mask(response);
  const at::Tensor counts_R = row_like(mask, logprobs_R) > 0;
  const at::Tensor selected_R = row_like(selected_.at(prompt).at(member), logprobs_R) > 0;
  const double own = denominator(total(mask));
  const auto sum = [](const at::Tensor& where_R, const at::Tensor& per_token_R) {
    return at::where(where_R, per_token_R, at::zeros_like(per_token_R)).sum();
  };

  Share share;
  share.policy = sum(selected_R, policy_losses(config_, response, advantages_.at(prompt).at(member), counts_R, logprobs_R)) / own;
  if (kl_in_loss(config_)) {
    share.kl = config_.beta * sum(counts_R, kl_losses(config_, response, counts_R, logprobs_R)) / own;
  }
  if (wants_entropy()) {
    const double divisor = config_.dialect == Dialect::kTrl ? std::max(selected_tokens_, 1.0) : own;
    share.entropy = -config_.entropy_coef * sum(selected_R, entropies_R) / divisor;
  }
  return share;
}

}  // namespace longstraw::reference
