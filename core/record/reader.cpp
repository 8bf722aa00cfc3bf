#include "core/record/reader.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <sstream>

#include "core/base/errors.h"
#include "core/record/gradient_reader.h"
#include "core/record/hdf5.h"
#include "core/record/header.h"
#include "core/record/metrics.h"
#include "core/record/opened_file.h"
#include "core/record/responses.h"
#include "core/record/rewards.h"

namespace longstraw::core::record {

using hdf5::Doing;
using hdf5::Handle;

struct RecordReader::Impl {
  explicit Impl(const std::string& path);

  std::string where(std::int64_t step) const { return fmt::format("record {}: /steps/{}", path, step_name(step)); }
  Handle open_step(std::int64_t step) const {
    const auto found = step_groups.find(step);
    if (found == step_groups.end()) throw FormatError(where(step) + ": missing");
    return {H5Gopen2(steps.id(), found->second.c_str(), H5P_DEFAULT), &H5Gclose, Doing::kReading, where(step)};
  }
  template <class T, class Read>
  std::map<std::string, T> values(std::int64_t step, const char* name, Read read) const;

  std::string path;
  OpenedFile file;
  Handle steps;
  RecordHeader header;
  bool closed = false;
  std::map<std::int64_t, std::string> step_groups;
};

RecordReader::Impl::Impl(const std::string& record_path) : path(record_path), file(path, "record " + path) {
  const std::string place = "record " + path;
  header = read_header(file.id(), place);
  closed = hdf5::read_int_attribute(file.id(), "closed", place) != 0;
  steps = hdf5::open_group(file.id(), "steps", place + ": ");
  for (const auto& name : hdf5::link_names(steps.id(), place + ": /steps")) step_groups[step_number(name, place)] = name;
}

template <class T, class Read>
std::map<std::string, T> RecordReader::Impl::values(std::int64_t step, const char* name, Read read) const {
  const auto group = open_step(step);
  std::map<std::string, T> result;
  if (!hdf5::exists(group.id(), name)) return result;
  const std::string place = where(step) + "/" + name;
  const auto holder = hdf5::open_group(group.id(), name, where(step));
  for (const auto& key : hdf5::attribute_names(holder.id(), place)) result[key] = read(holder.id(), key, place);
  return result;
}

RecordReader::RecordReader(const std::string& path) : impl_(std::make_unique<Impl>(path)) {}
RecordReader::~RecordReader() = default;
RecordReader::RecordReader(RecordReader&&) noexcept = default;
const std::string& RecordReader::path() const { return impl_->path; }
const RecordHeader& RecordReader::header() const { return impl_->header; }
bool RecordReader::closed() const { return impl_->closed; }

std::vector<std::int64_t> RecordReader::steps() const {
  std::vector<std::int64_t> numbers;
  for (const auto& [number, name] : impl_->step_groups) numbers.push_back(number);
  return numbers;
}

std::vector<GradientInfo> RecordReader::gradients(std::int64_t step) const {
  const auto group = impl_->open_step(step);
  if (!hdf5::exists(group.id(), "gradients")) return {};
  const std::string place = impl_->where(step) + "/gradients";
  const auto gradients = hdf5::open_group(group.id(), "gradients", impl_->where(step));
  std::vector<GradientInfo> result;
  for (const auto& name : hdf5::link_names(gradients.id(), place)) {
    const std::string dataset_place = place + "/" + name;
    const Handle dataset(H5Dopen2(gradients.id(), name.c_str(), H5P_DEFAULT), &H5Dclose, Doing::kReading, dataset_place);
    result.push_back(gradient_info(dataset.id(), name, dataset_place));
  }
  return result;
}

GradientReader RecordReader::gradient(std::int64_t step, const std::string& name) const {
  const auto group = impl_->open_step(step);
  const auto gradients = hdf5::open_group(group.id(), "gradients", impl_->where(step));
  return GradientReader(
      std::make_unique<GradientReader::State>(gradients.id(), name, impl_->file.descriptor(), impl_->where(step) + "/gradients"));
}

std::vector<std::string> RecordReader::sketch_names(std::int64_t step) const {
  const auto group = impl_->open_step(step);
  if (!hdf5::exists(group.id(), "sketches")) return {};
  const auto sketches = hdf5::open_group(group.id(), "sketches", impl_->where(step));
  return hdf5::link_names(sketches.id(), impl_->where(step) + "/sketches");
}

Sketch RecordReader::sketch(std::int64_t step, const std::string& name) const {
  const auto group = impl_->open_step(step);
  const std::string where = impl_->where(step) + "/sketches";
  const auto sketches = hdf5::open_group(group.id(), "sketches", impl_->where(step));
  Sketch sketch;
  sketch.buckets = hdf5::read_doubles(sketches.id(), name, where);
  const std::string place = where + "/" + name;
  const Handle dataset(H5Dopen2(sketches.id(), name.c_str(), H5P_DEFAULT), &H5Dclose, Doing::kReading, place);
  const auto kind = hdf5::read_text_attribute(dataset.id(), "kind", place);
  if (kind != "count_sketch") throw FormatError(fmt::format("{}: kind {}, expected count_sketch", place, kind));
  std::istringstream shape(hdf5::read_text_attribute(dataset.id(), "shape", place));
  for (std::int64_t dim = 0; shape >> dim;) sketch.shape.push_back(dim);
  sketch.seed = static_cast<std::uint64_t>(hdf5::read_int_attribute(dataset.id(), "seed", place));
  sketch.squared_norm = hdf5::read_double_attribute(dataset.id(), "squared_norm", place);
  sketch.nonfinite = hdf5::read_int_attribute(dataset.id(), "nonfinite", place);
  return sketch;
}

std::vector<ResponseRecord> RecordReader::responses(std::int64_t step) const {
  return read_responses(impl_->open_step(step).id(), impl_->where(step));
}

std::map<std::string, double> RecordReader::objective(std::int64_t step) const {
  return impl_->values<double>(step, "objective", &hdf5::read_double_attribute);
}

std::map<std::string, std::int64_t> RecordReader::memory(std::int64_t step) const {
  return impl_->values<std::int64_t>(step, "memory", &hdf5::read_int_attribute);
}

std::map<std::string, double> RecordReader::timing(std::int64_t step) const {
  return impl_->values<double>(step, "timing", &hdf5::read_double_attribute);
}

std::map<std::string, std::int64_t> RecordReader::checks(std::int64_t step) const {
  return impl_->values<std::int64_t>(step, "checks", &hdf5::read_int_attribute);
}

std::vector<RewardRow> RecordReader::rewards() const { return read_reward_rows(impl_->file.id(), "record " + impl_->path + ": "); }

std::vector<MetricsRow> RecordReader::metrics() const {
  return read_metrics_rows(impl_->file.id(), "record " + impl_->path + ": ");
}

bool is_being_written(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool locked = ::flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(fd);
  return locked;
}

}  // namespace longstraw::core::record
