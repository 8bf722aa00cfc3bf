#include "core/record/rewards.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <set>

#include "core/base/errors.h"

namespace longstraw::core::record {
namespace {

using hdf5::Doing;
using hdf5::Handle;

constexpr hsize_t kRowsPerChunk = 1024;
constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();

// An empty column that can grow; rows that are not written read as `fill`.
void create_column(hid_t group, const std::string& name, hid_t type, const void* fill, const std::string& where) {
  const std::string place = where + "/" + name;
  const hsize_t none = 0, unlimited = H5S_UNLIMITED, chunk = kRowsPerChunk;
  const Handle space(H5Screate_simple(1, &none, &unlimited), &H5Sclose, Doing::kWriting, place);
  const Handle creation(H5Pcreate(H5P_DATASET_CREATE), &H5Pclose, Doing::kWriting, place);
  hdf5::check(H5Pset_chunk(creation.id(), 1, &chunk), Doing::kWriting, place);
  if (fill != nullptr) hdf5::check(H5Pset_fill_value(creation.id(), type, fill), Doing::kWriting, place);
  const Handle dataset(H5Dcreate2(group, name.c_str(), type, space.id(), H5P_DEFAULT, creation.id(), H5P_DEFAULT), &H5Dclose,
                       Doing::kWriting, place);
}

void append_values(hid_t group, const std::string& name, hsize_t old_count, hsize_t added, hid_t memory_type, const void* values,
                   const std::string& where) {
  const std::string place = where + "/" + name;
  const Handle dataset(H5Dopen2(group, name.c_str(), H5P_DEFAULT), &H5Dclose, Doing::kWriting, place);
  const hsize_t count = old_count + added;
  hdf5::check(H5Dset_extent(dataset.id(), &count), Doing::kWriting, place);
  const Handle file_space(H5Dget_space(dataset.id()), &H5Sclose, Doing::kWriting, place);
  hdf5::check(H5Sselect_hyperslab(file_space.id(), H5S_SELECT_SET, &old_count, nullptr, &added, nullptr), Doing::kWriting, place);
  const Handle memory_space(H5Screate_simple(1, &added, nullptr), &H5Sclose, Doing::kWriting, place);
  hdf5::check(H5Dwrite(dataset.id(), memory_type, memory_space.id(), file_space.id(), H5P_DEFAULT, values), Doing::kWriting, place);
}

void create_table(hid_t file, const std::string& where) {
  const std::string place = where + "/rewards";
  const auto group = hdf5::create_group(file, "rewards", where);
  const auto text = hdf5::text_type(H5T_VARIABLE, Doing::kWriting, place);
  for (const char* name : {"step", "member", "length"}) create_column(group.id(), name, H5T_STD_I64LE, nullptr, place);
  for (const char* name : {"split", "prompt_id"}) create_column(group.id(), name, text.id(), nullptr, place);
  create_column(group.id(), "reward", H5T_IEEE_F64LE, nullptr, place);
  hdf5::create_group(group.id(), "parts", place);
}

void append_part(hid_t parts, const std::string& name, hsize_t old_count, const std::vector<RewardRow>& rows,
                 const std::string& where) {
  if (!hdf5::exists(parts, name)) create_column(parts, name, H5T_IEEE_F64LE, &kMissing, where);
  std::vector<double> values;
  for (const auto& row : rows) {
    const auto found = row.parts.find(name);
    values.push_back(found == row.parts.end() ? kMissing : found->second);
  }
  append_values(parts, name, old_count, rows.size(), H5T_NATIVE_DOUBLE, values.data(), where);
}

}  // namespace

void append_reward_rows(hid_t file, const std::vector<RewardRow>& rows, const std::string& where) {
  if (rows.empty()) return;
  const std::string place = where + "/rewards";
  if (!hdf5::exists(file, "rewards")) create_table(file, where);
  const auto group = hdf5::open_group(file, "rewards", where);
  const Handle step_column(H5Dopen2(group.id(), "step", H5P_DEFAULT), &H5Dclose, Doing::kWriting, place);
  const auto old_count = static_cast<hsize_t>(hdf5::shape_of(step_column.id(), place)[0]);

  const auto ints = [&](const char* name, auto get) {
    std::vector<std::int64_t> values;
    for (const auto& row : rows) values.push_back(get(row));
    append_values(group.id(), name, old_count, rows.size(), H5T_NATIVE_INT64, values.data(), place);
  };
  const auto text_type = hdf5::text_type(H5T_VARIABLE, Doing::kWriting, place);
  const auto texts = [&](const char* name, auto get) {
    std::vector<const char*> values;
    for (const auto& row : rows) values.push_back(get(row));
    append_values(group.id(), name, old_count, rows.size(), text_type.id(), values.data(), place);
  };
  ints("step", [](const auto& r) { return r.step; });
  ints("member", [](const auto& r) { return r.member; });
  ints("length", [](const auto& r) { return r.length; });
  texts("split", [](const auto& r) { return r.split.c_str(); });
  texts("prompt_id", [](const auto& r) { return r.prompt_id.c_str(); });
  std::vector<double> rewards;
  for (const auto& row : rows) rewards.push_back(row.reward.value_or(kMissing));
  append_values(group.id(), "reward", old_count, rows.size(), H5T_NATIVE_DOUBLE, rewards.data(), place);

  const auto parts = hdf5::open_group(group.id(), "parts", place);
  const auto known = hdf5::link_names(parts.id(), place);
  std::set<std::string> names(known.begin(), known.end());
  for (const auto& row : rows) {
    for (const auto& [name, value] : row.parts) names.insert(name);
  }
  for (const auto& name : names) append_part(parts.id(), name, old_count, rows, place + "/parts");
}

std::vector<RewardRow> read_reward_rows(hid_t file, const std::string& where) {
  if (!hdf5::exists(file, "rewards")) return {};
  const std::string place = where + "/rewards";
  const auto group = hdf5::open_group(file, "rewards", where);
  const hid_t id = group.id();
  const auto steps = hdf5::read_ints(id, "step", place);
  std::vector<RewardRow> rows(steps.size());
  const auto each = [&](const auto& values, const std::string& name, auto assign) {
    if (values.size() != rows.size()) {
      throw FormatError(fmt::format("{}/{}: {} rows, expected {}", place, name, values.size(), rows.size()));
    }
    for (std::size_t i = 0; i < rows.size(); ++i) assign(rows[i], values[i]);
  };
  each(steps, "step", [](auto& r, auto v) { r.step = v; });
  each(hdf5::read_ints(id, "member", place), "member", [](auto& r, auto v) { r.member = v; });
  each(hdf5::read_ints(id, "length", place), "length", [](auto& r, auto v) { r.length = v; });
  each(hdf5::read_texts(id, "split", place), "split", [](auto& r, const auto& v) { r.split = v; });
  each(hdf5::read_texts(id, "prompt_id", place), "prompt_id", [](auto& r, const auto& v) { r.prompt_id = v; });
  each(hdf5::read_doubles(id, "reward", place), "reward", [](auto& r, double v) {
    if (!std::isnan(v)) r.reward = v;
  });
  const auto parts = hdf5::open_group(id, "parts", place);
  for (const auto& name : hdf5::link_names(parts.id(), place + "/parts")) {
    each(hdf5::read_doubles(parts.id(), name, place + "/parts"), "parts/" + name, [&](auto& r, double v) {
      if (!std::isnan(v)) r.parts[name] = v;
    });
  }
  return rows;
}

}  // namespace longstraw::core::record
