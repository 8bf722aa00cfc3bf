#include "core/record/metrics.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/base/errors.h"
#include "core/record/columns.h"

namespace longstraw::core::record {

using hdf5::Doing;
using hdf5::Handle;

namespace {

constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();
using Extent = std::array<hsize_t, 2>;  // rows, columns
constexpr Extent kChunk{256, 8};

Handle open_values(hid_t group, Doing doing, const std::string& place) {
  if (!hdf5::exists(group, "values")) throw FormatError(place + ": missing");
  return {H5Dopen2(group, "values", H5P_DEFAULT), &H5Dclose, doing, place};
}

// Reads or writes row `row` of a dataset that has it.
void move_row(hid_t dataset, hsize_t row, std::vector<double>& values, Doing doing, const std::string& place) {
  const Extent start{row, 0}, count{1, values.size()};
  const Handle file_space(H5Dget_space(dataset), &H5Sclose, doing, place);
  hdf5::check(H5Sselect_hyperslab(file_space.id(), H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr), doing, place);
  const Handle memory_space(H5Screate_simple(2, count.data(), nullptr), &H5Sclose, doing, place);
  const hid_t type = H5T_NATIVE_DOUBLE;
  hdf5::check(doing == Doing::kReading ? H5Dread(dataset, type, memory_space.id(), file_space.id(), H5P_DEFAULT, values.data())
                                       : H5Dwrite(dataset, type, memory_space.id(), file_space.id(), H5P_DEFAULT, values.data()),
              doing, place);
}

}  // namespace

MetricsTable::MetricsTable(hid_t file, std::string where) : file_(file), where_(std::move(where)) {
  if (!hdf5::exists(file_, "metrics")) return;
  const std::string place = where_ + "/metrics";
  const auto group = hdf5::open_group(file_, "metrics", where_);
  steps_ = hdf5::read_ints(group.id(), "step", place);
  names_ = hdf5::read_texts(group.id(), "names", place);
}

void MetricsTable::create() {
  const std::string place = where_ + "/metrics";
  const auto group = hdf5::create_group(file_, "metrics", where_);
  create_column(group.id(), "step", H5T_STD_I64LE, nullptr, place);
  create_column(group.id(), "names", hdf5::text_type(H5T_VARIABLE, Doing::kWriting, place).id(), nullptr, place);
  const Extent none{0, 0}, unlimited{H5S_UNLIMITED, H5S_UNLIMITED};
  const Handle space(H5Screate_simple(2, none.data(), unlimited.data()), &H5Sclose, Doing::kWriting, place);
  const Handle creation(H5Pcreate(H5P_DATASET_CREATE), &H5Pclose, Doing::kWriting, place);
  hdf5::check(H5Pset_chunk(creation.id(), 2, kChunk.data()), Doing::kWriting, place);
  hdf5::check(H5Pset_fill_value(creation.id(), H5T_NATIVE_DOUBLE, &kMissing), Doing::kWriting, place);
  const Handle values(H5Dcreate2(group.id(), "values", H5T_IEEE_F64LE, space.id(), H5P_DEFAULT, creation.id(), H5P_DEFAULT),
                      &H5Dclose, Doing::kWriting, place);
}

void MetricsTable::add_columns(const std::map<std::string, double>& values) {
  std::vector<const char*> added;
  const size_t old_count = names_.size();
  for (const auto& [name, value] : values) {
    if (std::find(names_.begin(), names_.begin() + static_cast<std::ptrdiff_t>(old_count), name) ==
        names_.begin() + static_cast<std::ptrdiff_t>(old_count)) {
      names_.push_back(name);
    }
  }
  if (names_.size() == old_count) return;
  for (size_t i = old_count; i < names_.size(); ++i) added.push_back(names_[i].c_str());
  const std::string place = where_ + "/metrics";
  const auto group = hdf5::open_group(file_, "metrics", where_);
  append_values(group.id(), "names", old_count, added.size(), hdf5::text_type(H5T_VARIABLE, Doing::kWriting, place).id(),
                added.data(), place);
}

void MetricsTable::append(std::int64_t step, const std::map<std::string, double>& values) {
  if (!steps_.empty() && step < steps_.back()) {
    throw ConfigError(fmt::format("{}/metrics: step {} after step {}", where_, step, steps_.back()));
  }
  if (!hdf5::exists(file_, "metrics")) create();
  add_columns(values);
  const std::string place = where_ + "/metrics";
  const auto group = hdf5::open_group(file_, "metrics", where_);
  if (steps_.empty() || steps_.back() != step) {
    append_values(group.id(), "step", steps_.size(), 1, H5T_NATIVE_INT64, &step, place);
    steps_.push_back(step);
  }
  const Handle dataset = open_values(group.id(), Doing::kWriting, place + "/values");
  const Extent extent{steps_.size(), names_.size()};
  hdf5::check(H5Dset_extent(dataset.id(), extent.data()), Doing::kWriting, place + "/values");
  if (names_.empty()) return;
  std::vector<double> row(names_.size(), kMissing);
  move_row(dataset.id(), steps_.size() - 1, row, Doing::kReading, place + "/values");
  for (size_t i = 0; i < names_.size(); ++i) {
    if (const auto found = values.find(names_[i]); found != values.end()) row[i] = found->second;
  }
  move_row(dataset.id(), steps_.size() - 1, row, Doing::kWriting, place + "/values");
}

void MetricsTable::drop(std::int64_t from_step) {
  const auto kept = std::lower_bound(steps_.begin(), steps_.end(), from_step) - steps_.begin();
  if (kept == static_cast<std::ptrdiff_t>(steps_.size())) return;
  steps_.resize(static_cast<size_t>(kept));
  const std::string place = where_ + "/metrics";
  const auto group = hdf5::open_group(file_, "metrics", where_);
  keep_rows(group.id(), "step", steps_.size(), place);
  const Handle dataset = open_values(group.id(), Doing::kWriting, place + "/values");
  const Extent extent{steps_.size(), names_.size()};
  hdf5::check(H5Dset_extent(dataset.id(), extent.data()), Doing::kWriting, place + "/values");
}

std::vector<MetricsRow> read_metrics_rows(hid_t file, const std::string& where) {
  if (!hdf5::exists(file, "metrics")) return {};
  const std::string place = where + "/metrics";
  const auto group = hdf5::open_group(file, "metrics", where);
  const auto steps = hdf5::read_ints(group.id(), "step", place);
  const auto names = hdf5::read_texts(group.id(), "names", place);
  const Handle dataset = open_values(group.id(), Doing::kReading, place + "/values");
  const auto shape = hdf5::shape_of(dataset.id(), place + "/values");
  const std::vector<std::int64_t> wanted{static_cast<std::int64_t>(steps.size()), static_cast<std::int64_t>(names.size())};
  if (shape != wanted) {
    throw FormatError(fmt::format("{}/values: shape [{}], expected [{}]", place, fmt::join(shape, ", "), fmt::join(wanted, ", ")));
  }
  std::vector<double> values(steps.size() * names.size());
  if (!values.empty()) {
    hdf5::check(H5Dread(dataset.id(), H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), Doing::kReading,
                place + "/values");
  }
  std::vector<MetricsRow> rows(steps.size());
  for (size_t row = 0; row < rows.size(); ++row) {
    rows[row].step = steps[row];
    for (size_t i = 0; i < names.size(); ++i) {
      const double value = values[row * names.size() + i];
      if (!std::isnan(value)) rows[row].values[names[i]] = value;
    }
  }
  return rows;
}

}  // namespace longstraw::core::record
