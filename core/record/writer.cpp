#include "core/record/writer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <filesystem>

#include "core/base/errors.h"
#include "core/record/hdf5.h"
#include "core/record/header.h"
#include "core/record/journaled_file.h"
#include "core/record/metrics.h"
#include "core/record/reader.h"
#include "core/record/responses.h"
#include "core/record/rewards.h"
#include "core/record/sketch.h"

namespace longstraw::core::record {

using hdf5::Doing;
using hdf5::Handle;

std::string step_name(std::int64_t step) { return fmt::format("{:06}", step); }

struct RecordWriter::Impl {
  using Clock = std::chrono::steady_clock;

  void open(bool existing);
  void go_on(const RecordHeader& header, std::int64_t from_step);
  bool drop_steps(std::int64_t from_step);
  void commit();
  void rows_added();
  void require_open() const {
    if (file == nullptr) throw ConfigError(where + ": is closed");
  }

  std::string path;
  std::string where;
  WriterOptions options;
  std::unique_ptr<JournaledFile> file;
  Handle steps;
  std::optional<MetricsTable> metrics;
  bool step_open = false;
  Clock::time_point committed = Clock::now();
};

struct StepWriter::State {
  RecordWriter::Impl* record = nullptr;
  std::string where;
  std::string name;
  Handle group;
  Handle gradients;
  Handle sketches;
  std::vector<ResponseRecord> responses;
  bool has_memory = false;
  bool has_timing = false;

  ~State() { record->step_open = false; }
};

namespace {

Handle anonymous_group(hid_t file, const std::string& where) {
  return {H5Gcreate_anon(file, H5P_DEFAULT, H5P_DEFAULT), &H5Gclose, Doing::kWriting, where};
}

// Attributes of a group of their own: objective, memory, timing, checks. `required` may be null.
template <class T>
void write_values(hid_t step, const char* group_name, const std::map<std::string, T>& values, const char* required,
                  const std::string& where) {
  if (hdf5::exists(step, group_name)) throw ConfigError(fmt::format("{}/{}: given twice", where, group_name));
  if (required != nullptr && !values.contains(required))
    throw ConfigError(fmt::format("{}/{}: {} is missing", where, group_name, required));
  const auto group = hdf5::create_group(step, group_name, where);
  for (const auto& [name, value] : values) hdf5::write_attribute(group.id(), name, value, where + "/" + group_name);
}

void require_name(const std::string& name, const std::string& where) {
  // A slash or a lone dot would mean another place in the file.
  if (name.empty() || name == "." || name.find('/') != std::string::npos) {
    throw ConfigError(fmt::format("{}: '{}' is no parameter name", where, name));
  }
}

}  // namespace

StepWriter::StepWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
StepWriter::StepWriter(StepWriter&&) noexcept = default;
StepWriter::~StepWriter() = default;

StepWriter::State& StepWriter::open_state() const {
  if (state_ == nullptr) throw ConfigError("record: the step is already committed");
  return *state_;
}

template <class T>
void StepWriter::write_gradient(const std::string& name, const std::vector<std::int64_t>& shape, const T* data) {
  State& s = open_state();
  const std::string place = s.where + "/gradients/" + name;
  require_name(name, s.where + "/gradients");
  if (!s.gradients) s.gradients = hdf5::create_group(s.group.id(), "gradients", s.where);
  if (hdf5::exists(s.gradients.id(), name)) throw ConfigError(place + ": given twice");
  std::vector<hsize_t> dims;
  for (const std::int64_t dim : shape) {
    if (dim < 0) throw ConfigError(fmt::format("{}: dim {}", place, dim));
    dims.push_back(static_cast<hsize_t>(dim));
  }
  const bool wide = sizeof(T) == sizeof(double);
  const Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr), &H5Sclose, Doing::kWriting, place);
  const Handle dataset(H5Dcreate2(s.gradients.id(), name.c_str(), wide ? H5T_IEEE_F64LE : H5T_IEEE_F32LE, space.id(), H5P_DEFAULT,
                                  H5P_DEFAULT, H5P_DEFAULT),
                       &H5Dclose, Doing::kWriting, place);
  if (H5Sget_simple_extent_npoints(space.id()) == 0) return;
  hdf5::check(H5Dwrite(dataset.id(), wide ? H5T_NATIVE_DOUBLE : H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, data),
              Doing::kWriting, place);
}

void StepWriter::gradient(const std::string& name, const std::vector<std::int64_t>& shape, const float* data) {
  write_gradient(name, shape, data);
}

void StepWriter::gradient(const std::string& name, const std::vector<std::int64_t>& shape, const double* data) {
  write_gradient(name, shape, data);
}

void StepWriter::sketch(const std::string& name, const Sketch& sketch) {
  State& s = open_state();
  const std::string place = s.where + "/sketches";
  require_name(name, place);
  if (!s.sketches) s.sketches = hdf5::create_group(s.group.id(), "sketches", s.where);
  if (hdf5::exists(s.sketches.id(), name)) throw ConfigError(fmt::format("{}/{}: given twice", place, name));
  hdf5::write_array(s.sketches.id(), name, sketch.buckets, place);
  const std::string attributes = place + "/" + name;
  const Handle dataset(H5Dopen2(s.sketches.id(), name.c_str(), H5P_DEFAULT), &H5Dclose, Doing::kWriting, attributes);
  hdf5::write_attribute(dataset.id(), "kind", std::string("count_sketch"), attributes);
  hdf5::write_attribute(dataset.id(), "shape", fmt::format("{}", fmt::join(sketch.shape, " ")), attributes);
  hdf5::write_attribute(dataset.id(), "seed", static_cast<std::int64_t>(sketch.seed), attributes);
  hdf5::write_attribute(dataset.id(), "squared_norm", sketch.squared_norm, attributes);
  hdf5::write_attribute(dataset.id(), "nonfinite", sketch.nonfinite, attributes);
}

void StepWriter::response(ResponseRecord response) {
  State& s = open_state();
  check_response(response, s.where + "/responses");
  s.responses.push_back(std::move(response));
}

void StepWriter::objective(const std::map<std::string, double>& values) {
  State& s = open_state();
  write_values(s.group.id(), "objective", values, "loss", s.where);
}

void StepWriter::memory(const std::map<std::string, std::int64_t>& bytes) {
  State& s = open_state();
  write_values(s.group.id(), "memory", bytes, "peak_bytes", s.where);
  s.has_memory = true;
}

void StepWriter::timing(const std::map<std::string, double>& seconds) {
  State& s = open_state();
  write_values(s.group.id(), "timing", seconds, "total", s.where);
  s.has_timing = true;
}

void StepWriter::checks(const std::map<std::string, std::int64_t>& counts) {
  State& s = open_state();
  write_values(s.group.id(), "checks", counts, nullptr, s.where);
}

void StepWriter::commit() {
  State& s = open_state();
  if (!s.has_memory) throw ConfigError(s.where + "/memory: missing (peak_bytes)");
  if (!s.has_timing) throw ConfigError(s.where + "/timing: missing (total)");
  if (!s.responses.empty()) write_responses(s.group.id(), s.responses, s.where);
  hdf5::check(H5Olink(s.group.id(), s.record->steps.id(), s.name.c_str(), H5P_DEFAULT, H5P_DEFAULT), Doing::kWriting, s.where);
  s.record->commit();
  state_.reset();
}

void RecordWriter::Impl::open(bool existing) {
  file = std::make_unique<JournaledFile>(
      path, JournalOptions{.reopen = existing, .durable = options.durable, .before_write = options.before_write});
}

// True when there were some.
bool RecordWriter::Impl::drop_steps(std::int64_t from_step) {
  bool dropped = false;
  for (const auto& name : hdf5::link_names(steps.id(), where + ": /steps")) {
    if (step_number(name, where) < from_step) continue;
    hdf5::check(H5Ldelete(steps.id(), name.c_str(), H5P_DEFAULT), Doing::kWriting, where + ": /steps/" + name);
    dropped = true;
  }
  return dropped;
}

void RecordWriter::Impl::go_on(const RecordHeader& header, std::int64_t from_step) {
  open(true);
  check_same_inputs(read_header(file->id(), where), header, where);
  steps = hdf5::open_group(file->id(), "steps", where + ": ");
  const bool dropped = drop_steps(from_step);
  drop_reward_rows(file->id(), from_step, where + ": ");
  metrics.emplace(file->id(), where + ": ");
  metrics->drop(from_step);
  replace_header(file->id(), header, where);
  commit();
  if (!dropped) return;
  // New gradients in the room of old ones would pass through the journal: let HDF5 forget that room.
  metrics.reset();
  steps.reset();
  file->close();
  open(true);
  steps = hdf5::open_group(file->id(), "steps", where + ": ");
  metrics.emplace(file->id(), where + ": ");
}

void RecordWriter::Impl::commit() {
  file->commit();
  committed = Clock::now();
}

void RecordWriter::Impl::rows_added() {
  if (step_open) return;
  if (std::chrono::duration<double>(Clock::now() - committed).count() >= options.rows_wait_seconds) commit();
}

RecordWriter::RecordWriter(const std::string& path, const RecordHeader& header, WriterOptions options)
    : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  impl_->where = "record " + path;
  impl_->options = std::move(options);
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) {
    const bool goes_on = impl_->options.resume_from_step.has_value();
    if (!impl_->options.replace && !goes_on) throw IoError(impl_->where + ": exists already");
    if (!std::filesystem::is_regular_file(path, ignored)) throw IoError(impl_->where + ": exists and is no file");
    if (is_being_written(path)) throw IoError(impl_->where + ": another process is writing it");
    if (goes_on) {
      impl_->go_on(header, *impl_->options.resume_from_step);
      return;
    }
  }
  impl_->open(false);
  write_header(impl_->file->id(), header, impl_->where);
  impl_->steps = hdf5::create_group(impl_->file->id(), "steps", impl_->where);
  impl_->metrics.emplace(impl_->file->id(), impl_->where + ": ");
}

RecordWriter::~RecordWriter() = default;

StepWriter RecordWriter::begin_step(std::int64_t step) {
  impl_->require_open();
  if (step < 0) throw ConfigError(fmt::format("{}: step {}, expected at least 0", impl_->where, step));
  if (impl_->step_open) throw ConfigError(fmt::format("{}: step {} begins before the last one is committed", impl_->where, step));
  auto state = std::make_unique<StepWriter::State>();
  state->record = impl_.get();
  state->name = step_name(step);
  state->where = impl_->where + ": /steps/" + state->name;
  if (hdf5::exists(impl_->steps.id(), state->name)) throw ConfigError(state->where + ": exists already");
  state->group = anonymous_group(impl_->file->id(), state->where);
  impl_->step_open = true;
  return StepWriter(std::move(state));
}

void RecordWriter::append_rewards(const std::vector<RewardRow>& rows) {
  impl_->require_open();
  append_reward_rows(impl_->file->id(), rows, impl_->where);
  impl_->rows_added();
}

void RecordWriter::append_metrics(std::int64_t step, const std::map<std::string, double>& values) {
  impl_->require_open();
  impl_->metrics->append(step, values);
  impl_->rows_added();
}

void RecordWriter::publish() {
  impl_->require_open();
  if (impl_->step_open) throw ConfigError(impl_->where + ": published while a step is open");
  impl_->commit();
}

void RecordWriter::close() {
  impl_->require_open();
  if (impl_->step_open) throw ConfigError(impl_->where + ": closed while a step is open");
  hdf5::check(H5Adelete(impl_->file->id(), "closed"), Doing::kWriting, impl_->where);
  hdf5::write_attribute(impl_->file->id(), "closed", std::int64_t{1}, impl_->where);
  impl_->steps.reset();
  impl_->metrics.reset();
  impl_->file->close();
  impl_->file.reset();
}

}  // namespace longstraw::core::record
