#pragma once
// What is in a rollouts file, for people: read line by line, no line is kept.

#include <nlohmann/json.hpp>

#include <filesystem>

namespace longstraw::core::data {

// {"format": "longstraw-rollouts", "file", "lines", "prompts", "responses",
//  "group_size": {"min","max"}, "prompt_tokens": {"min","max","total"}, "response_tokens": {"min","max","total"},
//  "largest_token_id", "columns": {name: number of responses that have it}, "other_columns": [names],
//  "reward": {"count","mean","std","min","max"} or null, "groups_of_equal_rewards"}
// `prompt_tokens.total` counts each prompt once; `std` is the unbiased standard deviation over all responses.
// Throws FormatError for a line that read_rollouts would refuse; rules over whole groups are not checked.
nlohmann::json describe_rollouts(const std::filesystem::path& path);

// {"format": "longstraw-prompts", "file", "prompts", "kinds": {"text","chat","token_ids"}, "columns": [names]}
nlohmann::json describe_prompts(const std::filesystem::path& path);

// Does the file's first line look like a rollout (it has completion_ids) rather than a prompt?
bool is_rollouts_file(const std::filesystem::path& path);

}  // namespace longstraw::core::data
