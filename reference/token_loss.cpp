#include "reference/token_loss.h"

#include "core/base/errors.h"

#include <ATen/ATen.h>

namespace longstraw::reference {

using core::data::Response;
using core::objective::Dialect;
using core::objective::ImportanceSamplingLevel;
using core::objective::Kl;
using core::objective::LossType;
using core::objective::ObjectiveConfig;
using core::objective::SamplerCorrection;

namespace {

// Not a product with the mask: 0 · ∞ is no 0.
at::Tensor counted(const at::Tensor& values_R, const at::Tensor& counts_R) {
  return at::where(counts_R, values_R, at::zeros_like(values_R));
}

at::Tensor mean_of_counted(const at::Tensor& values_R, const at::Tensor& counts_R) {
  return counted(values_R, counts_R).sum() / counts_R.sum().clamp_min(1);
}

double upper_epsilon(const ObjectiveConfig& config) { return config.epsilon_high.value_or(config.epsilon); }

bool is_by_sequence(const ObjectiveConfig& config) {
  return config.loss_type == LossType::kGspo || config.importance_sampling_level == ImportanceSamplingLevel::kSequence;
}

// log r of every token, by the level of ratios.
at::Tensor log_ratios(const ObjectiveConfig& config, const at::Tensor& counts_R, const at::Tensor& logprobs_R,
                      const at::Tensor& old_R) {
  const at::Tensor log_ratio_R = logprobs_R - old_R;
  if (!is_by_sequence(config)) return log_ratio_R;
  const at::Tensor mean_R = mean_of_counted(log_ratio_R, counts_R).expand_as(log_ratio_R);
  if (config.loss_type == LossType::kGspo && config.dialect == Dialect::kVerl) {
    return mean_R.detach() + logprobs_R - logprobs_R.detach();
  }
  return mean_R;
}

at::Tensor clipped_losses(const ObjectiveConfig& config, double advantage, const at::Tensor& ratio_R) {
  const at::Tensor capped_R = config.delta ? ratio_R.clamp_max(*config.delta) : ratio_R;
  const at::Tensor clipped_R = ratio_R.clamp(1 - config.epsilon, 1 + upper_epsilon(config));
  const at::Tensor loss_R = -at::minimum(capped_R * advantage, clipped_R * advantage);
  if (config.clip_ratio_c && advantage < 0) return loss_R.clamp_max(-*config.clip_ratio_c * advantage);
  return loss_R;
}

at::Tensor gmpo_losses(const ObjectiveConfig& config, double advantage, const at::Tensor& counts_R, const at::Tensor& log_ratio_R) {
  if (advantage == 0) return 0 * log_ratio_R;  // a product, to stay a part of the graph
  const at::Tensor clamped_R =
      advantage > 0 ? log_ratio_R.clamp_max(upper_epsilon(config)) : log_ratio_R.clamp_min(-config.epsilon);
  return (-advantage * at::exp(mean_of_counted(clamped_R, counts_R))).expand_as(log_ratio_R);
}

at::Tensor uncorrected_losses(const ObjectiveConfig& config, double advantage, const at::Tensor& counts_R,
                              const at::Tensor& logprobs_R, const at::Tensor& old_R) {
  if (config.loss_type == LossType::kReinforce) return -advantage * logprobs_R;
  if (config.loss_type == LossType::kGmpo) return gmpo_losses(config, advantage, counts_R, logprobs_R - old_R);
  if (config.loss_type == LossType::kRloo) {
    const at::Tensor log_ratio = counted(logprobs_R - old_R, counts_R).sum();
    return clipped_losses(config, advantage, at::exp(log_ratio).expand_as(logprobs_R));
  }
  const at::Tensor ratio_R = at::exp(log_ratios(config, counts_R, logprobs_R, old_R));
  if (config.loss_type == LossType::kCispo) {
    const at::Tensor weight_R = config.dialect == Dialect::kTrl ? ratio_R.clamp_max(upper_epsilon(config))
                                                                : ratio_R.clamp(1 - config.epsilon, 1 + upper_epsilon(config));
    return -weight_R.detach() * advantage * logprobs_R;
  }
  if (config.loss_type == LossType::kSapo) {
    const double temperature = advantage > 0 ? config.sapo_temperature_pos : config.sapo_temperature_neg;
    return -at::sigmoid(temperature * (ratio_R - 1)) * (4 / temperature) * advantage;
  }
  return clipped_losses(config, advantage, ratio_R);
}

at::Tensor bounded(const ObjectiveConfig& config, const at::Tensor& weight_R) {
  const double least = config.importance_sampling_min;
  const double most = config.importance_sampling_cap;
  switch (config.importance_sampling_correction) {
    case SamplerCorrection::kTokenTruncate:
    case SamplerCorrection::kSequenceTruncate: return weight_R.clamp(least, most);
    default: return at::where((weight_R < least).logical_or(weight_R > most), at::zeros_like(weight_R), weight_R);
  }
}

at::Tensor sampler_corrections(const ObjectiveConfig& config, const at::Tensor& counts_R, const at::Tensor& old_R,
                               const at::Tensor& sampling_R) {
  const SamplerCorrection kind = config.importance_sampling_correction;
  at::Tensor log_weight_R = counted(old_R - sampling_R, counts_R);
  if (kind == SamplerCorrection::kSequenceTruncate || kind == SamplerCorrection::kSequenceMask) {
    log_weight_R = log_weight_R.sum().expand_as(log_weight_R);
  }
  const at::Tensor weight_R = bounded(config, at::exp(log_weight_R));
  if (config.loss_type != LossType::kGmpo) return weight_R;
  return at::exp(mean_of_counted(at::log(weight_R), counts_R)).expand_as(weight_R);
}

at::Tensor kl_estimates(const ObjectiveConfig& config, const at::Tensor& logprobs_R, const at::Tensor& reference_R) {
  const at::Tensor difference_R = reference_R - logprobs_R;
  switch (config.kl) {
    case Kl::kK1: return -difference_R;
    case Kl::kK2: return 0.5 * difference_R.square();
    case Kl::kK3: {
      if (config.dialect == Dialect::kTrl) return at::exp(difference_R) - difference_R - 1;
      const at::Tensor near_R = difference_R.clamp(-20, 20);
      return (at::exp(near_R) - near_R - 1).clamp(-10, 10);
    }
  }
  throw ConfigError("objective.kl: unknown estimator");
}

// lo, or the current policy's own without a gradient.
at::Tensor old_logprobs(const Response& response, const at::Tensor& counts_R, const at::Tensor& current_R) {
  return response.old_logprobs ? counted(row_like(*response.old_logprobs, current_R), counts_R) : current_R.detach();
}

}  // namespace

at::Tensor row_like(const std::vector<double>& values, const at::Tensor& like) {
  return at::tensor(at::ArrayRef<double>(values), at::kDouble).to(like.options());
}

at::Tensor policy_losses(const ObjectiveConfig& config, const Response& response, double advantage, const at::Tensor& counts_R,
                         const at::Tensor& logprobs_R) {
  // What doesn't count is a constant from here on: an infinite log-prob there must not reach a sum, nor its gradient.
  const at::Tensor current_R = counted(logprobs_R, counts_R);
  const at::Tensor old_R = old_logprobs(response, counts_R, current_R);
  const at::Tensor loss_R = uncorrected_losses(config, advantage, counts_R, current_R, old_R);
  const bool corrects =
      config.importance_sampling_correction != SamplerCorrection::kNone && response.old_logprobs && response.sampling_logprobs;
  if (!corrects) return loss_R;
  return loss_R *
         sampler_corrections(config, counts_R, old_R, counted(row_like(*response.sampling_logprobs, logprobs_R), counts_R));
}

at::Tensor kl_losses(const ObjectiveConfig& config, const Response& response, const at::Tensor& counts_R,
                     const at::Tensor& logprobs_R) {
  const at::Tensor current_R = counted(logprobs_R, counts_R);
  const at::Tensor reference_R = counted(row_like(*response.ref_logprobs, logprobs_R), counts_R);
  const at::Tensor kl_R = kl_estimates(config, current_R, reference_R);
  const bool as_trl = config.dialect == Dialect::kTrl && config.kl == Kl::kK3;
  if (!config.use_bias_correction_kl.value_or(as_trl)) return kl_R;
  const at::Tensor old_R = old_logprobs(response, counts_R, current_R);
  const at::Tensor ratio_R = at::exp(log_ratios(config, counts_R, current_R, old_R));
  if (!as_trl || is_by_sequence(config)) return kl_R * ratio_R;
  // r (e^(lr − lp) − (lr − lp) − 1) with r e^(lr − lp) = e^(lr − lo), a constant: two exponentials that cancel in the gradient, and
  // would leave few digits of it where lr is far above lp, are not there to cancel.
  return at::exp(reference_R - old_R) - ratio_R * (reference_R - current_R + 1);
}

}  // namespace longstraw::reference
