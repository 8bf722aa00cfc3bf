#include "core/record/rewards.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "core/base/errors.h"
#include "core/record/columns.h"

namespace longstraw::core::record {
namespace {

using hdf5::Doing;
using hdf5::Handle;

constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();

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

void drop_reward_rows(hid_t file, std::int64_t from_step, const std::string& where) {
  const auto rows = read_reward_rows(file, where);
  std::vector<RewardRow> kept;
  for (const auto& row : rows) {
    if (row.step < from_step) kept.push_back(row);
  }
  if (kept.size() == rows.size()) return;
  // Rows mostly come in the order of their steps: then those that stay are the first ones.
  const bool first =
      std::equal(kept.begin(), kept.end(), rows.begin(), [](const auto& a, const auto& b) { return a.step == b.step; });
  const std::string place = where + "/rewards";
  const auto group = hdf5::open_group(file, "rewards", where);
  const auto parts = hdf5::open_group(group.id(), "parts", place);
  const hsize_t count = first ? kept.size() : 0;
  for (const auto& name : hdf5::link_names(group.id(), place)) {
    if (name != "parts") keep_rows(group.id(), name, count, place);
  }
  for (const auto& name : hdf5::link_names(parts.id(), place)) keep_rows(parts.id(), name, count, place + "/parts");
  if (!first) append_reward_rows(file, kept, where);
}

}  // namespace longstraw::core::record
