#pragma once
// What reward functions and reward programs are asked, and how their answer is read (docs/rollouts.md has the protocol).

#include "core/data/prompts.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::data {

// One completion to score, with the row of its prompt.
struct ScoredCompletion {
  const PromptRow* prompt = nullptr;
  std::string completion;
  std::vector<std::int64_t> completion_ids;
};

// {"prompts", "completions", "completion_ids", "columns"}: lists with one entry a completion. Columns are those of the prompts,
// repeated for each completion as TRL does, null for a prompt that lacks one.
nlohmann::json reward_request(const std::vector<ScoredCompletion>& completions);

// `answer`["rewards"]: `count` numbers or nulls. ProcessError (kAnswer) naming `function` for anything else.
std::vector<std::optional<double>> rewards_in(const nlohmann::json& answer, const std::string& function, std::size_t count);

}  // namespace longstraw::core::data
