#pragma once
// Reads a record (docs/record.md) without loading it: names, shapes and attributes at once, gradients in blocks.
//
// FormatError, naming file and place, for a file that is missing, no HDF5 file, some other HDF5 file, truncated, of a newer
// format version, without an attribute of the header, or being written at this moment. A record whose writer died inside a
// commit is healed first (journaled_file.h). Reading is single-threaded, as the HDF5 library is.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/record/record.h"
#include "core/record/sketch.h"

namespace longstraw::core::record {

// A gradient without its elements.
struct GradientInfo {
  std::string name;
  std::vector<std::int64_t> shape;
  std::string dtype;  // float32 | float64
  std::int64_t elements = 0;

  bool operator==(const GradientInfo&) const = default;
};

// One open gradient. Elements are counted row-major.
class GradientReader {
 public:
  GradientReader(GradientReader&&) noexcept;
  ~GradientReader();
  const GradientInfo& info() const;
  // Elements [offset, offset + count) as double; float32 converts exactly.
  void read(std::int64_t offset, std::int64_t count, double* out) const;

 private:
  friend class RecordReader;
  struct State;
  explicit GradientReader(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

class RecordReader {
 public:
  explicit RecordReader(const std::string& path);
  ~RecordReader();
  RecordReader(RecordReader&&) noexcept;

  const std::string& path() const;
  const RecordHeader& header() const;
  // False: the run that wrote it was interrupted; the steps it has are whole.
  bool closed() const;
  std::vector<std::int64_t> steps() const;  // rising
  // In increasing order of name. Empty when the step keeps none.
  std::vector<GradientInfo> gradients(std::int64_t step) const;
  GradientReader gradient(std::int64_t step, const std::string& name) const;
  std::vector<std::string> sketch_names(std::int64_t step) const;
  Sketch sketch(std::int64_t step, const std::string& name) const;
  std::vector<ResponseRecord> responses(std::int64_t step) const;
  std::map<std::string, double> objective(std::int64_t step) const;  // empty when absent
  std::map<std::string, std::int64_t> memory(std::int64_t step) const;
  std::map<std::string, double> timing(std::int64_t step) const;
  std::map<std::string, std::int64_t> checks(std::int64_t step) const;  // empty when absent
  std::vector<RewardRow> rewards() const;
  std::vector<MetricsRow> metrics() const;  // rising steps

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Whether a writer holds `path` at this moment.
bool is_being_written(const std::string& path);

// What is in a record, for people and programs: header, and for each step its gradients' names, shapes and dtypes, numbers of
// responses, objective, memory and timing.
nlohmann::json describe(const std::string& path);

}  // namespace longstraw::core::record
