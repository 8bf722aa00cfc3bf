#pragma once
// A batch of responses, and the JSONL files it is kept in (docs/rollouts.md is the format's contract).

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::data {

// One response. Vectors have one entry a token of completion_ids; all numbers are finite.
struct Response {
  std::vector<std::int64_t> completion_ids;                  // at least one
  std::optional<double> reward;                              // missing: the reward function had none
  std::vector<std::optional<double>> reward_parts;           // by reward function; given: `reward` is their weighted sum
  std::optional<double> advantage;                           // given: used as it is, the reward then decides nothing
  std::optional<std::vector<double>> old_logprobs;           // of the policy that sampled, as the trainer computes them
  std::optional<std::vector<double>> ref_logprobs;           // of the reference model of the KL term
  std::optional<std::vector<double>> sampling_logprobs;      // as the sampler itself reported them
  std::optional<std::vector<std::uint8_t>> completion_mask;  // 1: the token counts in the loss; missing: all count

  bool operator==(const Response&) const = default;
};

// The responses to one prompt, in the order of the file.
struct PromptGroup {
  std::string prompt_id;
  std::vector<std::int64_t> prompt_ids;  // at least one; of a single token the prompt state is empty
  std::vector<Response> responses;       // at least one

  bool operator==(const PromptGroup&) const = default;
};

using Batch = std::vector<PromptGroup>;  // in the order of each prompt_id's first line

struct RolloutLimits {
  std::optional<std::int64_t> vocab_size;  // ids must be below it
};

// Reads and checks the whole batch, line by line (memory: the batch and one line). Throws FormatError naming file,
// line, key and value for anything docs/rollouts.md does not allow.
Batch read_rollouts(const std::filesystem::path& path, const RolloutLimits& limits = {});

enum class RolloutLayout {
  kCompletions,  // a line a completion
  kGroups,       // a line a prompt: a long prompt is written once
};

// Writes `batch` whole or not at all (a file beside it, then a rename); read_rollouts gives back the same batch.
// Throws IoError if it can't be written; an existing file is then untouched.
void write_rollouts(const std::filesystem::path& path, const Batch& batch, RolloutLayout layout = RolloutLayout::kCompletions);

// SHA-256 over the batch's content in a canonical binary form: the same for both layouts and any spelling of numbers.
std::string data_sha256(const Batch& batch);

}  // namespace longstraw::core::data
