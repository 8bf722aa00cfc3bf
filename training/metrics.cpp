#include "training/metrics.h"

#include "longstraw/token_loss.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace longstraw::training {
namespace {

using core::data::Batch;
using core::data::Response;
using core::model::StepGradient;
using core::objective::Dialect;
using core::objective::ImportanceSamplingLevel;
using core::objective::Kl;
using core::objective::LossType;
using core::objective::ObjectiveConfig;

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double mean(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return values.empty() ? kNone : sum / double(values.size());
}

// Unbiased; 0 for a single value, none for none.
double deviation(const std::vector<double>& values) {
  if (values.size() < 2) return values.empty() ? kNone : 0.0;
  const double center = mean(values);
  double squares = 0.0;
  for (const double value : values) squares += (value - center) * (value - center);
  return std::sqrt(squares / double(values.size() - 1));
}

double least(const std::vector<double>& values) { return values.empty() ? kNone : *std::min_element(values.begin(), values.end()); }
double most(const std::vector<double>& values) { return values.empty() ? kNone : *std::max_element(values.begin(), values.end()); }

void add_lengths(Metrics& metrics, const std::string& kind, const std::vector<double>& lengths) {
  metrics["completions/mean_" + kind] = mean(lengths);
  metrics["completions/min_" + kind] = least(lengths);
  metrics["completions/max_" + kind] = most(lengths);
}

void add_rewards(Metrics& metrics, const Batch& batch, const std::vector<std::string>& names) {
  std::vector<double> all, zero_spread;
  std::vector<std::vector<double>> parts(names.size());
  for (const auto& group : batch) {
    std::vector<double> own;
    for (const Response& response : group.responses) {
      if (response.reward) own.push_back(*response.reward);
      for (size_t k = 0; k < std::min(names.size(), response.reward_parts.size()); ++k) {
        if (response.reward_parts[k]) parts[k].push_back(*response.reward_parts[k]);
      }
    }
    all.insert(all.end(), own.begin(), own.end());
    zero_spread.push_back(own.empty() || least(own) == most(own) ? 1.0 : 0.0);
  }
  metrics["reward"] = mean(all);
  metrics["reward_std"] = deviation(all);
  metrics["frac_reward_zero_std"] = mean(zero_spread);
  for (size_t k = 0; k < names.size(); ++k) {
    const bool alone = names.size() == 1 && parts[k].empty();  // a batch that has the sum alone
    metrics["rewards/" + names[k] + "/mean"] = alone ? mean(all) : mean(parts[k]);
    metrics["rewards/" + names[k] + "/std"] = alone ? deviation(all) : deviation(parts[k]);
  }
}

bool counts(const Response& response, size_t t) { return !response.completion_mask || (*response.completion_mask)[t] != 0; }

// What the sampler reported against what the trainer computes, where a batch has both.
void add_sampling(Metrics& metrics, const Batch& batch) {
  std::vector<double> ratios, differences;
  for (const auto& group : batch) {
    for (const Response& response : group.responses) {
      if (!response.sampling_logprobs || !response.old_logprobs) continue;
      for (size_t t = 0; t < response.completion_ids.size(); ++t) {
        if (!counts(response, t)) continue;
        const double difference = (*response.old_logprobs)[t] - (*response.sampling_logprobs)[t];
        ratios.push_back(std::exp(difference));
        differences.push_back(std::abs(difference));
      }
    }
  }
  if (ratios.empty()) return;
  metrics["sampling/importance_sampling_ratio/min"] = least(ratios);
  metrics["sampling/importance_sampling_ratio/mean"] = mean(ratios);
  metrics["sampling/importance_sampling_ratio/max"] = most(ratios);
  metrics["sampling/sampling_logp_difference/mean"] = mean(differences);
  metrics["sampling/sampling_logp_difference/max"] = most(differences);
}

// Of one response: Σ over its counted tokens, and how many there are.
struct Share {
  double sum = 0.0, count = 0.0;
  double mean() const { return count > 0.0 ? sum / count : kNone; }
};

// Over all tokens of the step, and of each response by itself.
struct Shares {
  double sum = 0.0, count = 0.0;
  std::vector<double> by_response;
  void add(const Share& share) {
    sum += share.sum;
    count += share.count;
    if (share.count > 0.0) by_response.push_back(share.mean());
  }
  double mean() const { return sum / std::max(count, 1.0); }
};

Share over_tokens(const Response& response, const std::function<double(size_t t)>& value) {
  Share share;
  for (size_t t = 0; t < response.completion_ids.size(); ++t) {
    if (!counts(response, t)) continue;
    share.sum += value(t);
    share.count += 1.0;
  }
  return share;
}

double kl_estimate(const ObjectiveConfig& objective, double logprob, double reference) {
  double difference = reference - logprob;
  switch (objective.kl) {
    case Kl::kK1: return -difference;
    case Kl::kK2: return 0.5 * difference * difference;
    case Kl::kK3: break;
  }
  const bool clamped = objective.dialect == Dialect::kVerl;
  if (clamped) difference = std::clamp(difference, -20.0, 20.0);
  const double estimate = std::exp(difference) - difference - 1.0;
  return clamped ? std::clamp(estimate, -10.0, 10.0) : estimate;
}

// What multiplies the KL of each token under use_bias_correction_kl.
std::vector<double> kl_ratios(const ObjectiveConfig& objective, const Response& response, const std::vector<double>& logprobs) {
  std::vector<double> ratios(logprobs.size(), 1.0);
  if (!corrects_kl(objective) || !response.old_logprobs) return ratios;
  const auto log_ratio = [&](size_t t) { return logprobs[t] - (*response.old_logprobs)[t]; };
  const bool shared =
      objective.importance_sampling_level == ImportanceSamplingLevel::kSequence || objective.loss_type == LossType::kGspo;
  const double mean = shared ? over_tokens(response, log_ratio).mean() : 0.0;
  for (size_t t = 0; t < ratios.size(); ++t) ratios[t] = std::exp(shared ? mean : log_ratio(t));
  return ratios;
}

bool is_sequence_level(const ObjectiveConfig& objective) {
  return objective.importance_sampling_level == ImportanceSamplingLevel::kSequence || objective.loss_type == LossType::kGspo ||
         objective.loss_type == LossType::kGmpo;
}

void add_clipping(Metrics& metrics, const Batch& batch, const StepGradient& gradient, const ObjectiveConfig& objective) {
  if (objective.loss_type == LossType::kReinforce || objective.loss_type == LossType::kSapo) return;
  const bool cispo = objective.loss_type == LossType::kCispo;
  const double width = objective.epsilon_high.value_or(objective.epsilon);
  const double low_bound = 1.0 - objective.epsilon;
  const double high_bound = cispo && objective.dialect == Dialect::kTrl ? width : 1.0 + width;
  Shares low, high, region;
  for (size_t g = 0; g < batch.size(); ++g) {
    for (size_t m = 0; m < batch[g].responses.size(); ++m) {
      const Response& response = batch[g].responses[m];
      const double advantage = gradient.advantages[g][m];
      const auto log_ratio = [&](size_t t) {
        return response.old_logprobs ? gradient.logprobs[g][m][t] - (*response.old_logprobs)[t] : 0.0;
      };
      const bool sequence = is_sequence_level(objective);
      const double whole = sequence ? std::exp(over_tokens(response, log_ratio).mean()) : 1.0;
      const auto share = [&](const std::function<bool(double)>& clipped) {
        if (sequence) return Share{clipped(whole) ? 1.0 : 0.0, 1.0};
        return over_tokens(response, [&](size_t t) { return clipped(std::exp(log_ratio(t))) ? 1.0 : 0.0; });
      };
      const auto is_low = [&](double r) { return r < low_bound && advantage < 0.0; };
      const auto is_high = [&](double r) { return r > high_bound && advantage > 0.0; };
      low.add(share(is_low));
      high.add(share(is_high));
      region.add(share([&](double r) { return is_low(r) || is_high(r); }));
    }
  }
  if (cispo) {
    metrics["cispo_clip_ratio"] = high.mean();
    return;
  }
  metrics["clip_ratio/low_mean"] = low.mean();
  metrics["clip_ratio/low_min"] = least(low.by_response);
  metrics["clip_ratio/high_mean"] = high.mean();
  metrics["clip_ratio/high_max"] = most(high.by_response);
  metrics["clip_ratio/region_mean"] = region.mean();
}

}  // namespace

Metrics generation_metrics(const Batch& batch, const std::vector<std::string>& reward_names,
                           const std::vector<std::vector<uint8_t>>& truncated) {
  Metrics metrics;
  std::vector<double> lengths, terminated;
  for (size_t g = 0; g < batch.size(); ++g) {
    for (size_t m = 0; m < batch[g].responses.size(); ++m) {
      lengths.push_back(double(batch[g].responses[m].completion_ids.size()));
      if (!truncated.at(g).at(m)) terminated.push_back(lengths.back());
    }
  }
  add_lengths(metrics, "length", lengths);
  metrics["completions/clipped_ratio"] = lengths.empty() ? kNone : 1.0 - double(terminated.size()) / double(lengths.size());
  add_lengths(metrics, "terminated_length", terminated.empty() ? std::vector<double>{0.0} : terminated);
  add_rewards(metrics, batch, reward_names);
  add_sampling(metrics, batch);
  return metrics;
}

Metrics step_metrics(const Batch& batch, const StepGradient& gradient, const ObjectiveConfig& objective) {
  Metrics metrics{{"loss", gradient.loss}};
  Shares kl, entropy;
  bool with_kl = true;
  for (size_t g = 0; g < batch.size(); ++g) {
    for (size_t m = 0; m < batch[g].responses.size(); ++m) {
      const Response& response = batch[g].responses[m];
      with_kl = with_kl && response.ref_logprobs.has_value();
      if (with_kl) {
        const std::vector<double>& logprobs = gradient.logprobs[g][m];
        const std::vector<double> ratios = kl_ratios(objective, response, logprobs);
        kl.add(over_tokens(response,
                           [&](size_t t) { return ratios[t] * kl_estimate(objective, logprobs[t], (*response.ref_logprobs)[t]); }));
      }
      if (!gradient.entropies.empty()) entropy.add(over_tokens(response, [&](size_t t) { return gradient.entropies[g][m][t]; }));
    }
  }
  if (with_kl && !batch.empty()) metrics["kl"] = kl.mean();
  if (!gradient.entropies.empty()) metrics["entropy"] = entropy.mean();
  add_clipping(metrics, batch, gradient, objective);
  return metrics;
}

void MetricsAverage::add(const Metrics& metrics) {
  for (const auto& [name, value] : metrics) {
    auto& values = values_[name];
    if (name == "num_tokens" || name == "epoch") values.clear();
    if (std::isfinite(value)) values.push_back(value);
  }
}

Metrics MetricsAverage::take() {
  Metrics result;
  for (const auto& [name, values] : values_) result[name] = mean(values);
  values_.clear();
  return result;
}

}  // namespace longstraw::training
