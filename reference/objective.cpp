#include "reference/objective.h"

#include "core/base/errors.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace longstraw::reference {

using core::data::Batch;
using core::data::PromptGroup;
using core::data::Response;
using core::objective::Kl;
using core::objective::LossType;
using core::objective::ObjectiveConfig;
using core::objective::ScaleRewards;

namespace {

std::vector<double> rewards_of(const PromptGroup& group) {
  std::vector<double> rewards;
  for (const Response& response : group.responses) {
    if (response.reward) rewards.push_back(*response.reward);
  }
  return rewards;
}

double mean(const std::vector<double>& values) {
  return values.empty() ? 0.0 : std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
}

double unbiased_deviation(const std::vector<double>& values) {
  if (values.size() < 2) return 0.0;
  const double center = mean(values);
  double squares = 0.0;
  for (const double value : values) squares += (value - center) * (value - center);
  return std::sqrt(squares / double(values.size() - 1));
}

bool all_equal(const std::vector<double>& values) {
  return std::adjacent_find(values.begin(), values.end(), std::not_equal_to<>()) == values.end();
}

at::Tensor row(const std::vector<double>& values, const at::Tensor& like) {
  return at::tensor(at::ArrayRef<double>(values), at::kDouble).to(like.options());
}

at::Tensor mask_of(const Response& response, const at::Tensor& like) {
  std::vector<double> mask(response.completion_ids.size(), 1.0);
  if (response.completion_mask) {
    std::transform(response.completion_mask->begin(), response.completion_mask->end(), mask.begin(),
                   [](uint8_t counts) { return counts ? 1.0 : 0.0; });
  }
  return row(mask, like);
}

double counted_tokens(const Response& response) {
  if (!response.completion_mask) return double(response.completion_ids.size());
  return double(
      std::count_if(response.completion_mask->begin(), response.completion_mask->end(), [](uint8_t m) { return m != 0; }));
}

at::Tensor kl_per_token(Kl kind, const at::Tensor& logprobs_R, const at::Tensor& reference_R) {
  const at::Tensor difference_R = reference_R - logprobs_R;
  switch (kind) {
    case Kl::kK1: return -difference_R;
    case Kl::kK2: return 0.5 * difference_R.square();
    case Kl::kK3: return at::exp(difference_R) - difference_R - 1;
  }
  throw ConfigError("objective.kl: unknown estimator");
}

}  // namespace

std::vector<std::vector<double>> advantages(const Batch& batch, const ObjectiveConfig& config) {
  std::vector<double> all_rewards;
  for (const PromptGroup& group : batch) {
    const auto rewards = rewards_of(group);
    all_rewards.insert(all_rewards.end(), rewards.begin(), rewards.end());
  }
  std::vector<std::vector<double>> result;
  for (const PromptGroup& group : batch) {
    const auto rewards = rewards_of(group);
    // Stated, not computed: the rounded mean of equal numbers may differ from them, and dividing what is left by the
    // rounded deviation makes an advantage out of nothing.
    const bool nothing_to_tell = all_equal(rewards);
    const double center = mean(rewards);
    auto& row = result.emplace_back();
    for (const Response& response : group.responses) {
      if (response.advantage) {
        row.push_back(*response.advantage);
      } else if (!response.reward || nothing_to_tell) {
        row.push_back(0.0);
      } else {
        double advantage = *response.reward - center;
        if (config.scale_rewards == ScaleRewards::kGroup) advantage /= unbiased_deviation(rewards) + config.advantage_epsilon;
        if (config.scale_rewards == ScaleRewards::kBatch) advantage /= unbiased_deviation(all_rewards) + config.advantage_epsilon;
        row.push_back(advantage);
      }
    }
  }
  return result;
}

BatchObjective::BatchObjective(const Batch& batch, const ObjectiveConfig& config, int64_t max_completion_length)
    : batch_(batch),
      config_(config),
      max_completion_length_(double(max_completion_length)),
      advantages_(reference::advantages(batch, config)) {
  for (const PromptGroup& group : batch) {
    for (size_t member = 0; member < group.responses.size(); ++member) {
      const Response& response = group.responses[member];
      responses_ += 1;
      tokens_ += counted_tokens(response);
      if (config.beta > 0 && !response.ref_logprobs) {
        throw ConfigError(fmt::format("objective.beta: {} needs ref_logprobs of every response; prompt {} response {} has none",
                                      config.beta, group.prompt_id, member));
      }
    }
  }
}

double BatchObjective::denominator(double own_tokens) const {
  switch (config_.loss_type) {
    case LossType::kGrpo: return responses_ * std::max(own_tokens, 1.0);
    case LossType::kDapo:
    case LossType::kBnpo: return std::max(tokens_, 1.0);
    case LossType::kDrGrpo: return responses_ * max_completion_length_;
  }
  throw ConfigError("objective.loss_type: unknown");
}

BatchObjective::Share BatchObjective::share(size_t prompt, size_t member, const at::Tensor& logprobs_R) const {
  const Response& response = batch_.at(prompt).responses.at(member);
  const double advantage = advantages_.at(prompt).at(member);
  const at::Tensor counts_R = mask_of(response, logprobs_R) > 0;
  const double total = denominator(counted_tokens(response));
  const auto average = [&](const at::Tensor& per_token_R) {
    return at::where(counts_R, per_token_R, at::zeros_like(per_token_R)).sum() / total;
  };

  const at::Tensor old_R = response.old_logprobs ? row(*response.old_logprobs, logprobs_R) : logprobs_R.detach();
  const at::Tensor ratio_R = at::exp(logprobs_R - old_R);
  const at::Tensor capped_R = config_.delta ? ratio_R.clamp_max(*config_.delta) : ratio_R;
  const at::Tensor clipped_R = ratio_R.clamp(1 - config_.epsilon, 1 + config_.epsilon_high.value_or(config_.epsilon));
  Share share;
  share.policy = average(-at::minimum(capped_R * advantage, clipped_R * advantage));
  if (config_.beta > 0) {
    share.kl = average(config_.beta * kl_per_token(config_.kl, logprobs_R, row(*response.ref_logprobs, logprobs_R)));
  }
  return share;
}

}  // namespace longstraw::reference
