#include "training/record_step.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

namespace longstraw::training {
namespace {

using core::data::Batch;
using core::data::Response;
using core::record::ResponseRecord;

void write_gradients(core::record::StepWriter& writer, const RecordedGradient& step) {
  const auto& parameters = step.decoder.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor gradient = step.result.gradients[i].to(at::kCPU).contiguous();
    const std::vector<int64_t> shape = gradient.sizes().vec();
    if (gradient.scalar_type() == at::kDouble) {
      writer.gradient(parameters[i]->name, shape, gradient.const_data_ptr<double>());
    } else {
      writer.gradient(parameters[i]->name, shape, gradient.const_data_ptr<float>());
    }
  }
}

// A column is recorded when every response has it.
bool all_have(const Batch& batch, std::optional<std::vector<double>> Response::*column) {
  return std::all_of(batch.begin(), batch.end(), [&](const auto& group) {
    return std::all_of(group.responses.begin(), group.responses.end(), [&](const Response& r) { return (r.*column).has_value(); });
  });
}

void write_responses(core::record::StepWriter& writer, const RecordedGradient& step) {
  const bool old = all_have(step.batch, &Response::old_logprobs), reference = all_have(step.batch, &Response::ref_logprobs);
  for (size_t g = 0; g < step.batch.size(); ++g) {
    const auto& group = step.batch[g];
    for (size_t m = 0; m < group.responses.size(); ++m) {
      const Response& response = group.responses[m];
      ResponseRecord record{.prompt_id = group.prompt_id,
                            .group = int64_t(g),
                            .member = int64_t(m),
                            .prompt_length = int64_t(group.prompt_ids.size()),
                            .last_prompt_token = group.prompt_ids.back(),
                            .tokens = response.completion_ids,
                            .mask = std::vector<uint8_t>(response.completion_ids.size(), 1),
                            .policy_logprobs = step.result.logprobs[g][m],
                            .old_logprobs = {},
                            .reference_logprobs = {},
                            .trace = {},
                            .reward = response.reward,
                            .advantage = step.result.advantages[g][m]};
      if (response.completion_mask) record.mask = *response.completion_mask;
      if (old) record.old_logprobs = response.old_logprobs;
      if (reference) record.reference_logprobs = response.ref_logprobs;
      if (!step.result.traces.empty()) record.trace = step.result.traces[g][m];
      writer.response(std::move(record));
    }
  }
}

// The reference computes nothing again, so it has nothing to check.
std::map<std::string, int64_t> checks_of(const core::model::StepGradient& result) {
  std::map<std::string, int64_t> checks;
  for (const char* name : {"changed_choices", "recompute_mismatches"}) {
    const auto found = result.facts.find(name);
    if (found != result.facts.end()) checks[name] = int64_t(found->second);
  }
  return checks;
}

}  // namespace

void write_step(core::record::StepWriter& out, const RecordedGradient& step) {
  write_gradients(out, step);
  write_responses(out, step);
  std::map<std::string, double> objective = step.result.loss_parts;
  objective["loss"] = step.result.loss;
  objective.insert(step.result.facts.begin(), step.result.facts.end());
  out.objective(objective);
  out.memory(step.result.bytes);
  out.timing(step.result.seconds);
  if (const auto checks = checks_of(step.result); !checks.empty()) out.checks(checks);
}

std::vector<core::record::RewardRow> reward_rows(const Batch& batch, int64_t step, const std::string& split,
                                                 const std::vector<std::string>& names) {
  std::vector<core::record::RewardRow> rows;
  for (const auto& group : batch) {
    for (size_t m = 0; m < group.responses.size(); ++m) {
      const Response& response = group.responses[m];
      if (!response.reward) continue;
      core::record::RewardRow row{.step = step,
                                  .split = split,
                                  .prompt_id = group.prompt_id,
                                  .member = int64_t(m),
                                  .reward = response.reward,
                                  .parts = {},
                                  .length = int64_t(response.completion_ids.size())};
      for (size_t k = 0; k < std::min(names.size(), response.reward_parts.size()); ++k) {
        if (response.reward_parts[k]) row.parts[names[k]] = *response.reward_parts[k];
      }
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace longstraw::training
