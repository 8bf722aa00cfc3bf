#pragma once
// The /metrics table: one row a step, one column a name; both grow. A figure that a step does not have is NaN.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/record/hdf5.h"
#include "core/record/record.h"

namespace longstraw::core::record {

// The table of an open file, while rows are written.
class MetricsTable {
 public:
  // Of what the file has; a file without the table gets it at the first append().
  MetricsTable(hid_t file, std::string where);

  // A new last row, or more figures of the last one. ConfigError for a step before the last row's.
  void append(std::int64_t step, const std::map<std::string, double>& values);
  // Rows of step `from_step` and later go.
  void drop(std::int64_t from_step);

 private:
  void create();
  void add_columns(const std::map<std::string, double>& values);

  hid_t file_;
  std::string where_;
  std::vector<std::int64_t> steps_;
  std::vector<std::string> names_;
};

std::vector<MetricsRow> read_metrics_rows(hid_t file, const std::string& where);

}  // namespace longstraw::core::record
