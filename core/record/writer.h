#pragma once
// Writes a record (docs/record.md). A step is built out of sight and appears whole at commit() or not at all; a process
// that dies leaves the committed steps readable, at any moment (journaled_file.h). A record that was not closed says so:
// its attribute `closed` is 0.
//
//   RecordWriter writer("exact.h5", header);
//   StepWriter step = writer.begin_step(0);
//   step.gradient("model.norm.weight", {576}, data);
//   step.memory({{"peak_bytes", peak}});
//   step.timing({{"total", seconds}});
//   step.commit();
//   writer.close();
//
// IoError on a full disk, a folder that can't be written, a file that exists (unless replace), another writer on the same
// path. ConfigError on wrong use: a step twice, a gradient twice, arrays of unequal length, a missing peak_bytes or total.
// After an IoError the writer accepts nothing more. Not for several threads.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/record/record.h"

namespace longstraw::core::record {

class JournaledFile;
struct Sketch;

struct WriterOptions {
  bool replace = false;  // an existing file of this name goes when the first step is committed, not before
  // Go on with an existing record of the same arm, model_sha256, data_sha256, seed and dtype (FormatError otherwise): its steps and
  // its rows of rewards and metrics from this one on are dropped, the header's other attributes become the new ones. A missing file
  // is begun. IoError when another process reads it.
  std::optional<std::int64_t> resume_from_step = {};
  bool durable = true;  // fsync at each commit
  // Rows of rewards and metrics are published together, at most so often: a commit is several syncs of the disk. 0: at once.
  double rows_wait_seconds = 0.0;
  std::function<void()> before_write = {};  // called before each step that changes the disk; for tests
};

class StepWriter {
 public:
  StepWriter(StepWriter&&) noexcept;
  StepWriter& operator=(StepWriter&&) = delete;
  // Without commit() nothing of the step remains.
  ~StepWriter();

  // Stored in the type of `data`, bit for bit, non-finite values too. `name` and `shape` are the checkpoint's. The data is
  // row-major and is not referred to after the call.
  void gradient(const std::string& name, const std::vector<std::int64_t>& shape, const float* data);
  void gradient(const std::string& name, const std::vector<std::int64_t>& shape, const double* data);
  // Instead of, or beside, the gradient of that name.
  void sketch(const std::string& name, const Sketch& sketch);
  void response(ResponseRecord response);
  void objective(const std::map<std::string, double>& values);    // must hold `loss`
  void memory(const std::map<std::string, std::int64_t>& bytes);  // must hold `peak_bytes`
  void timing(const std::map<std::string, double>& seconds);      // must hold `total`
  // What the run found when it checked itself: changed_choices, ... Optional.
  void checks(const std::map<std::string, std::int64_t>& counts);
  // Publishes the step. Needs memory() and timing(); an absent objective is left out.
  void commit();

 private:
  friend class RecordWriter;
  struct State;
  explicit StepWriter(std::unique_ptr<State> state);
  template <class T>
  void write_gradient(const std::string& name, const std::vector<std::int64_t>& shape, const T* data);
  State& open_state() const;

  std::unique_ptr<State> state_;
};

class RecordWriter {
 public:
  RecordWriter(const std::string& path, const RecordHeader& header, WriterOptions options = {});
  ~RecordWriter();
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

  // One step at a time; the writer must outlive it. `step` is new to the record.
  StepWriter begin_step(std::int64_t step);
  // Rows are published together with the step where one is open, else as rows_wait_seconds says.
  void append_rewards(const std::vector<RewardRow>& rows);
  // The figures of a step, by name; steps do not fall, and a step that is given again has more figures. One that is not a number
  // reads as missing.
  void append_metrics(std::int64_t step, const std::map<std::string, double>& values);
  // Rows that wait are on the disk when it returns.
  void publish();
  // Marks the record as complete and publishes it. Without close() the record reads as interrupted.
  void close();

 private:
  friend class StepWriter;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longstraw::core::record
