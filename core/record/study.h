#pragma once
// The study record: how far a cheaper arm's gradient is from the whole one, over a grid of prompt length, group size, response
// length, tail and family. One HDF5 file (docs/study.md is the layout), one cell a point of the grid.
//
//   StudyWriter writer("study.h5", header);            // an existing study is continued
//   if (!writer.has(key, inputs)) writer.append(cell); // a cell appears whole or not at all; then it is on disk
//   writer.close();
//
// IoError on a full disk, a folder that can't be written, another writer on the same path. FormatError for a file that is no study,
// or that holds the cell made from other inputs. ConfigError on wrong use: a cell twice, a cell without its `whole` row.
// Not for several threads.

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace longstraw::core::record {

inline constexpr const char* kStudyFormat = "longstraw-study";
inline constexpr std::int64_t kStudyFormatVersion = 1;

// What ran last; root attributes.
struct StudyHeader {
  std::string command;  // the command line that made it
  std::string config_yaml;
  std::string torch_version;
  std::string device;  // cpu | cuda

  bool operator==(const StudyHeader&) const = default;
};

// A point of the grid: cells are found by it.
struct StudyKey {
  std::string family;  // model_type
  std::string model;   // name of the checkpoint, for people
  std::string arm;     // detached | tail | ...: what is compared with the reference
  std::string dtype;   // float64 | float32 | bfloat16
  std::int64_t prompt_tokens = 0;
  std::int64_t group_size = 0;
  std::int64_t response_tokens = 0;  // of each response
  std::int64_t tail_tokens = 0;      // W; 0 with detached, prompt_tokens when nothing is cut
  std::int64_t seed = 0;

  auto operator<=>(const StudyKey&) const = default;
};

// "llama SmolLM2 tail float32 P=256 G=2 R=32 W=16 seed=0"
std::string describe(const StudyKey& key);

// The fixed inputs behind a cell: the same key with others of these is another study.
struct StudyInputs {
  std::string model_sha256;
  std::string data_sha256;

  bool operator==(const StudyInputs&) const = default;
};

enum class StudyScope { kWhole, kLayer, kKind, kLayerAndKind };
const char* scope_name(StudyScope scope);  // whole | layer | kind | layer_and_kind

// One group of parameters in one cell. Formulas: compare/statistics.h; b is the reference's gradient, a the arm's.
struct StudyRow {
  StudyScope scope = StudyScope::kWhole;
  std::int64_t layer = -1;  // -1: over all layers, or outside the layers
  std::string kind;         // "self_attn.q_proj.weight"; empty: over all kinds
  std::int64_t elements = 0;
  double reference_norm = 0;   // |b|
  double candidate_norm = 0;   // |a|
  double difference_norm = 0;  // |a - b|: the norm of what the arm drops
  double cosine = 0;
  double relative_l2 = 0;
  double norm_ratio = 0;
  double sign_agreement = 0;
  double update_cosine = 0;  // of AdamW's first updates g / (|g| + 1e-8)
  double sign_cosine = 0;    // of the signs: (agreeing - opposing non-zero elements) / sqrt(non-zero of a * non-zero of b)

  bool operator==(const StudyRow&) const = default;
};

struct StudyCell {
  StudyKey key;
  StudyInputs inputs;
  std::string git_commit;                 // of the program that computed it
  std::map<std::string, double> numbers;  // loss, seconds, ...: what the writer wants to keep beside the rows
  std::vector<StudyRow> rows;             // exactly one with scope whole

  bool operator==(const StudyCell&) const = default;
};

// Null when there is none. ("whole" is find_row(cell, StudyScope::kWhole).)
const StudyRow* find_row(const StudyCell& cell, StudyScope scope, std::int64_t layer = -1, const std::string& kind = {});

struct StudyWriterOptions {
  bool durable = true;                      // fsync at each cell
  std::function<void()> before_write = {};  // called before each step that changes the disk; for tests
};

class StudyWriter {
 public:
  // Cells of an existing study at `path` are kept; the file itself is first touched by the next append() or close().
  StudyWriter(const std::string& path, const StudyHeader& header, StudyWriterOptions options = {});
  ~StudyWriter();
  StudyWriter(const StudyWriter&) = delete;
  StudyWriter& operator=(const StudyWriter&) = delete;

  std::int64_t size() const;
  bool has(const StudyKey& key) const;
  // The same, and FormatError when it is there but was made from other inputs: better asked before the cell is computed.
  bool has(const StudyKey& key, const StudyInputs& inputs) const;
  void append(const StudyCell& cell);
  // Marks the study as complete.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class StudyReader {
 public:
  explicit StudyReader(const std::string& path);
  ~StudyReader();

  const StudyHeader& header() const;
  // False: the run that wrote it was interrupted; the cells it has are whole.
  bool closed() const;
  std::int64_t size() const;
  StudyCell cell(std::int64_t index) const;  // in the order they were appended
  std::vector<StudyCell> cells() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longstraw::core::record
