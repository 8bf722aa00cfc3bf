#include "training/evaluation.h"

#include <utility>

namespace longstraw::training {
namespace {

// Keeps evaluations from drawing what training draws.
constexpr uint64_t kEvaluationStream = 0x6576616C;

}  // namespace

Evaluation evaluate(const PromptSet& prompts, const core::data::RolloutConfig& rollout, uint64_t seed, const SamplingParts& parts,
                    const std::vector<std::string>& reward_names) {
  std::vector<Draw> draws;
  for (int64_t n = 0; n < prompts.size(); ++n) draws.push_back({&prompts[n], mixed(mixed(seed, kEvaluationStream), uint64_t(n))});
  SampledGroups sampled = sample_scored(draws, rollout, /*held_bytes=*/0, parts);
  Evaluation evaluation;
  std::vector<std::vector<uint8_t>> truncated;
  for (auto& group : sampled.groups) {
    evaluation.batch.push_back(std::move(group.group));
    truncated.push_back(std::move(group.truncated));
  }
  for (const auto& [name, value] : generation_metrics(evaluation.batch, reward_names, truncated)) {
    evaluation.metrics["eval_" + name] = value;
  }
  evaluation.metrics["eval_runtime"] = sampled.sampling_seconds + sampled.reward_seconds;
  return evaluation;
}

}  // namespace longstraw::training
