#pragma once
// What a record holds, apart from gradients: plain data shared by writer and reader. docs/record.md is the layout.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::record {

inline constexpr const char* kFormat = "longstraw-record";
inline constexpr std::int64_t kFormatVersion = 1;

// Root attributes. `model_sha256`, `data_sha256` and `seed` are the fixed inputs: records that differ in one of them are
// not compared.
struct RecordHeader {
  std::string arm;          // reference | detached | tail | exact, or what made the record
  std::string config_yaml;  // the resolved configuration
  std::string model_sha256;
  std::string data_sha256;
  std::string dtype;   // the dtype of the computation: float64 | float32 | bfloat16
  std::string device;  // cpu | cuda
  std::int64_t world_size = 1;
  std::int64_t seed = 0;
  std::string torch_version;
  std::string git_commit;
  bool deterministic = true;
  std::map<std::string, std::string> extra;  // further attributes; a name of the list above is refused

  bool operator==(const RecordHeader&) const = default;
};

// One response of a group. `mask` and each present log-prob array and trace are as long as `tokens`.
struct ResponseRecord {
  std::string prompt_id;
  std::int64_t group = 0;   // index of the group in the step
  std::int64_t member = 0;  // index in the group
  std::int64_t prompt_length = 0;
  std::int64_t last_prompt_token = -1;  // id of the token that predicts the first response token; -1: not recorded
  std::vector<std::int64_t> tokens;
  std::vector<std::uint8_t> mask;  // 1: counts in the loss
  std::optional<std::vector<double>> policy_logprobs;
  std::optional<std::vector<double>> old_logprobs;
  std::optional<std::vector<double>> reference_logprobs;
  // By name of a point in the forward pass, in order of computation when sorted: one number a token, which changes when
  // what is computed there changes. Optional; see docs/record.md.
  std::map<std::string, std::vector<double>> trace;
  std::optional<double> reward;
  double advantage = 0;

  bool operator==(const ResponseRecord&) const = default;
};

// One row of the rewards table.
struct RewardRow {
  std::int64_t step = 0;
  std::string split;  // train | eval | ...
  std::string prompt_id;
  std::int64_t member = 0;
  std::optional<double> reward;
  std::map<std::string, double> parts;  // by the name of the reward function
  std::int64_t length = 0;              // tokens of the response

  bool operator==(const RewardRow&) const = default;
};

// One row of the table of metrics: figures of a step by name. One that is not a number counts as missing.
struct MetricsRow {
  std::int64_t step = 0;
  std::map<std::string, double> values;

  bool operator==(const MetricsRow&) const = default;
};

// "000003": names sort as numbers do, up to a million steps.
std::string step_name(std::int64_t step);

}  // namespace longstraw::core::record
