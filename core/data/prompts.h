#pragma once
// Prompts to sample responses for: JSONL, one prompt a line (docs/rollouts.md).

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::data {

struct PromptRow {
  std::string prompt_id;  // missing in the file: the number of the line
  nlohmann::json prompt;  // text, or a list of chat messages {role, content}; null when only prompt_ids are given
  std::optional<std::vector<std::int64_t>> prompt_ids;  // given: used as they are, no tokenizer is asked
  nlohmann::json columns = nlohmann::json::object();    // every other column: what the reward function gets
};

bool is_parquet(const std::filesystem::path& path);  // by its suffix

// Throws FormatError naming file, line, key and value: no prompt, an empty one, a prompt_id that occurs twice; Parquet, which
// prepared_prompts (prepared.h) reads.
std::vector<PromptRow> read_prompts(const std::filesystem::path& path);

}  // namespace longstraw::core::data
