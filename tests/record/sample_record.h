#pragma once
// Small records for tests, and a folder that goes with the test.

#include <filesystem>
#include <string>
#include <vector>

#include "core/record/record.h"
#include "core/record/writer.h"

namespace longstraw::core::record::testing {

class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

RecordHeader sample_header();
std::vector<ResponseRecord> sample_responses(std::int64_t step);
// The value of element `index` of every gradient of a step.
double sample_value(std::int64_t step, std::int64_t index);
std::vector<RewardRow> sample_rewards(std::int64_t step);

// One whole step: two gradients (float32 and float64), responses, objective, memory, timing and reward rows.
void write_sample_step(RecordWriter& writer, std::int64_t step);
// Throws std::runtime_error, naming the difference, unless the step reads back as it was written.
void check_sample_step(const std::string& path, std::int64_t step, const RecordHeader& header = sample_header());

}  // namespace longstraw::core::record::testing
