#include "core/data/reward_request.h"

#include "core/data/child_process.h"
#include "core/data/json_lines.h"

#include <fmt/format.h>

#include <set>

namespace longstraw::core::data {

using nlohmann::json;

json reward_request(const std::vector<ScoredCompletion>& completions) {
  std::set<std::string> names;
  for (const ScoredCompletion& one : completions) {
    for (const auto& [name, value] : one.prompt->columns.items()) names.insert(name);
  }
  json request = {
      {"prompts", json::array()}, {"completions", json::array()}, {"completion_ids", json::array()}, {"columns", json::object()}};
  for (const ScoredCompletion& one : completions) {
    request["prompts"].push_back(one.prompt->prompt);
    request["completions"].push_back(one.completion);
    request["completion_ids"].push_back(one.completion_ids);
    for (const std::string& name : names) request["columns"][name].push_back(one.prompt->columns.value(name, json()));
  }
  return request;
}

std::vector<std::optional<double>> rewards_in(const json& answer, const std::string& function, std::size_t count) {
  const auto found = answer.find("rewards");
  const json rewards = found == answer.end() ? json() : *found;
  if (!rewards.is_array() || rewards.size() != count) {
    throw ProcessError(ProcessFault::kAnswer,
                       fmt::format("reward function {}: got {}, wanted {} rewards", function, describe(rewards), count));
  }
  std::vector<std::optional<double>> result;
  for (const json& reward : rewards) {
    if (!reward.is_null() && !reward.is_number()) {
      throw ProcessError(ProcessFault::kAnswer, fmt::format("reward function {}: got {} for completion {}, wanted a number or null",
                                                            function, describe(reward), result.size()));
    }
    result.push_back(reward.is_null() ? std::nullopt : std::optional(reward.get<double>()));
  }
  return result;
}

}  // namespace longstraw::core::data
