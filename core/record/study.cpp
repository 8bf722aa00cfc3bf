#include "core/record/study.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>

#include "core/base/errors.h"
#include "core/record/hdf5.h"
#include "core/record/journaled_file.h"
#include "core/record/opened_file.h"
#include "core/record/record.h"

namespace longstraw::core::record {

using hdf5::Doing;
using hdf5::Handle;

namespace {

constexpr std::array kScopes{StudyScope::kWhole, StudyScope::kLayer, StudyScope::kKind, StudyScope::kLayerAndKind};

// One list of fields for writing and reading.
struct TextField {
  const char* name;
  std::string StudyKey::*member;
};
struct CountField {
  const char* name;
  std::int64_t StudyKey::*member;
};
struct NumberColumn {
  const char* name;
  double StudyRow::*member;
};
constexpr std::array kTextFields{TextField{"family", &StudyKey::family}, TextField{"model", &StudyKey::model},
                                 TextField{"arm", &StudyKey::arm}, TextField{"dtype", &StudyKey::dtype}};
constexpr std::array kCountFields{CountField{"prompt_tokens", &StudyKey::prompt_tokens},
                                  CountField{"group_size", &StudyKey::group_size},
                                  CountField{"response_tokens", &StudyKey::response_tokens},
                                  CountField{"tail_tokens", &StudyKey::tail_tokens}, CountField{"seed", &StudyKey::seed}};
constexpr std::array kNumberColumns{
    NumberColumn{"reference_norm", &StudyRow::reference_norm},   NumberColumn{"candidate_norm", &StudyRow::candidate_norm},
    NumberColumn{"difference_norm", &StudyRow::difference_norm}, NumberColumn{"cosine", &StudyRow::cosine},
    NumberColumn{"relative_l2", &StudyRow::relative_l2},         NumberColumn{"norm_ratio", &StudyRow::norm_ratio},
    NumberColumn{"sign_agreement", &StudyRow::sign_agreement},   NumberColumn{"update_cosine", &StudyRow::update_cosine},
    NumberColumn{"sign_cosine", &StudyRow::sign_cosine}};

StudyScope parse_scope(const std::string& name, const std::string& where) {
  for (const StudyScope scope : kScopes) {
    if (name == scope_name(scope)) return scope;
  }
  throw FormatError(fmt::format("{}/scope: {}, expected whole, layer, kind or layer_and_kind", where, name));
}

void require_one_whole(const StudyCell& cell, const std::string& where) {
  const auto whole = std::count_if(cell.rows.begin(), cell.rows.end(), [](const auto& r) { return r.scope == StudyScope::kWhole; });
  if (whole != 1) throw ConfigError(fmt::format("{}: {} rows with scope whole, expected 1", where, whole));
}

template <class T, class Get>
std::vector<T> column(const StudyCell& cell, Get get) {
  std::vector<T> values;
  values.reserve(cell.rows.size());
  for (const auto& row : cell.rows) values.push_back(get(row));
  return values;
}

void write_cell(hid_t group, const StudyCell& cell, const std::string& where) {
  for (const auto& field : kTextFields) hdf5::write_attribute(group, field.name, cell.key.*field.member, where);
  for (const auto& field : kCountFields) hdf5::write_attribute(group, field.name, cell.key.*field.member, where);
  hdf5::write_attribute(group, "model_sha256", cell.inputs.model_sha256, where);
  hdf5::write_attribute(group, "data_sha256", cell.inputs.data_sha256, where);
  hdf5::write_attribute(group, "git_commit", cell.git_commit, where);
  const auto numbers = hdf5::create_group(group, "numbers", where);
  for (const auto& [name, value] : cell.numbers) hdf5::write_attribute(numbers.id(), name, value, where + "/numbers");

  hdf5::write_array(group, "scope", column<std::string>(cell, [](const auto& r) { return scope_name(r.scope); }), where);
  hdf5::write_array(group, "layer", column<std::int64_t>(cell, [](const auto& r) { return r.layer; }), where);
  hdf5::write_array(group, "kind", column<std::string>(cell, [](const auto& r) { return r.kind; }), where);
  hdf5::write_array(group, "elements", column<std::int64_t>(cell, [](const auto& r) { return r.elements; }), where);
  for (const auto& c : kNumberColumns) {
    hdf5::write_array(group, c.name, column<double>(cell, [&](const auto& r) { return r.*c.member; }), where);
  }
}

StudyCell read_cell(hid_t group, const std::string& where) {
  StudyCell cell;
  for (const auto& field : kTextFields) cell.key.*field.member = hdf5::read_text_attribute(group, field.name, where);
  for (const auto& field : kCountFields) cell.key.*field.member = hdf5::read_int_attribute(group, field.name, where);
  cell.inputs.model_sha256 = hdf5::read_text_attribute(group, "model_sha256", where);
  cell.inputs.data_sha256 = hdf5::read_text_attribute(group, "data_sha256", where);
  cell.git_commit = hdf5::read_text_attribute(group, "git_commit", where);
  const auto numbers = hdf5::open_group(group, "numbers", where);
  for (const auto& name : hdf5::attribute_names(numbers.id(), where + "/numbers")) {
    cell.numbers[name] = hdf5::read_double_attribute(numbers.id(), name, where + "/numbers");
  }

  const auto scopes = hdf5::read_texts(group, "scope", where);
  cell.rows.resize(scopes.size());
  const auto each = [&](const auto& values, const std::string& name, auto assign) {
    if (values.size() != cell.rows.size()) {
      throw FormatError(fmt::format("{}/{}: {} rows, expected {}", where, name, values.size(), cell.rows.size()));
    }
    for (std::size_t i = 0; i < values.size(); ++i) assign(cell.rows[i], values[i]);
  };
  each(scopes, "scope", [&](auto& r, const auto& v) { r.scope = parse_scope(v, where); });
  each(hdf5::read_ints(group, "layer", where), "layer", [](auto& r, auto v) { r.layer = v; });
  each(hdf5::read_texts(group, "kind", where), "kind", [](auto& r, const auto& v) { r.kind = v; });
  each(hdf5::read_ints(group, "elements", where), "elements", [](auto& r, auto v) { r.elements = v; });
  for (const auto& c : kNumberColumns) {
    each(hdf5::read_doubles(group, c.name, where), c.name, [&](auto& r, double v) { r.*c.member = v; });
  }
  return cell;
}

void write_header(hid_t file, const StudyHeader& h, const std::string& where) {
  hdf5::write_attribute(file, "format", std::string(kStudyFormat), where);
  hdf5::write_attribute(file, "format_version", kStudyFormatVersion, where);
  hdf5::write_attribute(file, "command", h.command, where);
  hdf5::write_attribute(file, "config", h.config_yaml, where);
  hdf5::write_attribute(file, "torch_version", h.torch_version, where);
  hdf5::write_attribute(file, "device", h.device, where);
  hdf5::write_attribute(file, "closed", std::int64_t{0}, where);
}

StudyHeader read_header(hid_t file, const std::string& where) {
  if (!hdf5::has_attribute(file, "format") || hdf5::read_text_attribute(file, "format", where) != kStudyFormat) {
    throw FormatError(fmt::format("{}: is an HDF5 file but no study (attribute format is not {})", where, kStudyFormat));
  }
  const std::int64_t version = hdf5::read_int_attribute(file, "format_version", where);
  if (version < 1 || version > kStudyFormatVersion) {
    throw FormatError(fmt::format("{}: format_version {}, this program reads up to {}", where, version, kStudyFormatVersion));
  }
  return {.command = hdf5::read_text_attribute(file, "command", where),
          .config_yaml = hdf5::read_text_attribute(file, "config", where),
          .torch_version = hdf5::read_text_attribute(file, "torch_version", where),
          .device = hdf5::read_text_attribute(file, "device", where)};
}

}  // namespace

const char* scope_name(StudyScope scope) {
  switch (scope) {
    case StudyScope::kWhole: return "whole";
    case StudyScope::kLayer: return "layer";
    case StudyScope::kKind: return "kind";
    case StudyScope::kLayerAndKind: return "layer_and_kind";
  }
  throw ConfigError(fmt::format("study: scope {} does not exist", static_cast<int>(scope)));
}

std::string describe(const StudyKey& k) {
  return fmt::format("{} {} {} {} P={} G={} R={} W={} seed={}", k.family, k.model, k.arm, k.dtype, k.prompt_tokens, k.group_size,
                     k.response_tokens, k.tail_tokens, k.seed);
}

const StudyRow* find_row(const StudyCell& cell, StudyScope scope, std::int64_t layer, const std::string& kind) {
  const auto found = std::find_if(cell.rows.begin(), cell.rows.end(), [&](const StudyRow& row) {
    return row.scope == scope && row.layer == layer && row.kind == kind;
  });
  return found == cell.rows.end() ? nullptr : &*found;
}

struct StudyWriter::Impl {
  std::string where;
  std::optional<JournaledFile> file;
  Handle cells;
  std::map<StudyKey, StudyInputs> known;

  // Linked last: what an error interrupts is not there. Without a commit.
  void add(const StudyCell& cell) {
    const std::string name = step_name(static_cast<std::int64_t>(known.size()));
    const std::string place = fmt::format("{}: /cells/{}", where, name);
    const Handle group(H5Gcreate_anon(file->id(), H5P_DEFAULT, H5P_DEFAULT), &H5Gclose, Doing::kWriting, place);
    write_cell(group.id(), cell, place);
    hdf5::check(H5Olink(group.id(), cells.id(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT), Doing::kWriting, place);
    known[cell.key] = cell.inputs;
  }
};

StudyWriter::StudyWriter(const std::string& path, const StudyHeader& header, StudyWriterOptions options)
    : impl_(std::make_unique<Impl>()) {
  impl_->where = "study " + path;
  std::error_code ignored;
  // The new file first: while it is locked no other writer can publish a study of this name.
  impl_->file.emplace(path, JournalOptions{.durable = options.durable, .before_write = std::move(options.before_write)});
  write_header(impl_->file->id(), header, impl_->where);
  impl_->cells = hdf5::create_group(impl_->file->id(), "cells", impl_->where);
  if (!std::filesystem::exists(path, ignored)) return;
  const StudyReader before(path);
  for (std::int64_t i = 0; i < before.size(); ++i) impl_->add(before.cell(i));
}

StudyWriter::~StudyWriter() = default;

std::int64_t StudyWriter::size() const { return static_cast<std::int64_t>(impl_->known.size()); }

bool StudyWriter::has(const StudyKey& key) const { return impl_->known.contains(key); }

bool StudyWriter::has(const StudyKey& key, const StudyInputs& inputs) const {
  const auto found = impl_->known.find(key);
  if (found == impl_->known.end()) return false;
  const auto require = [&](const char* name, const std::string& there, const std::string& wanted) {
    if (there == wanted) return;
    throw FormatError(fmt::format("{}: cell {}: {} {}, expected {}: it was made from other inputs; write to another file",
                                  impl_->where, describe(key), name, there, wanted));
  };
  require("model_sha256", found->second.model_sha256, inputs.model_sha256);
  require("data_sha256", found->second.data_sha256, inputs.data_sha256);
  return true;
}

void StudyWriter::append(const StudyCell& cell) {
  if (!impl_->file) throw ConfigError(impl_->where + ": is closed");
  const std::string place = fmt::format("{}: cell {}", impl_->where, describe(cell.key));
  if (has(cell.key)) throw ConfigError(place + ": is there already");
  require_one_whole(cell, place);
  impl_->add(cell);
  impl_->file->commit();
}

void StudyWriter::close() {
  if (!impl_->file) throw ConfigError(impl_->where + ": is closed");
  hdf5::check(H5Adelete(impl_->file->id(), "closed"), Doing::kWriting, impl_->where);
  hdf5::write_attribute(impl_->file->id(), "closed", std::int64_t{1}, impl_->where);
  impl_->cells.reset();
  impl_->file->close();
  impl_->file.reset();
}

struct StudyReader::Impl {
  explicit Impl(const std::string& path) : where("study " + path), file(path, where) {
    header = read_header(file.id(), where);
    closed = hdf5::read_int_attribute(file.id(), "closed", where) != 0;
    cells = hdf5::open_group(file.id(), "cells", where + ": ");
    names = hdf5::link_names(cells.id(), where + ": /cells");
  }

  std::string where;
  OpenedFile file;
  StudyHeader header;
  bool closed = false;
  Handle cells;
  std::vector<std::string> names;
};

StudyReader::StudyReader(const std::string& path) : impl_(std::make_unique<Impl>(path)) {}
StudyReader::~StudyReader() = default;
const StudyHeader& StudyReader::header() const { return impl_->header; }
bool StudyReader::closed() const { return impl_->closed; }
std::int64_t StudyReader::size() const { return static_cast<std::int64_t>(impl_->names.size()); }

StudyCell StudyReader::cell(std::int64_t index) const {
  if (index < 0 || index >= size()) throw FormatError(fmt::format("{}: cell {}, there are {}", impl_->where, index, size()));
  const auto& name = impl_->names[static_cast<std::size_t>(index)];
  const auto group = hdf5::open_group(impl_->cells.id(), name, impl_->where + ": /cells");
  return read_cell(group.id(), impl_->where + ": /cells/" + name);
}

std::vector<StudyCell> StudyReader::cells() const {
  std::vector<StudyCell> result;
  for (std::int64_t i = 0; i < size(); ++i) result.push_back(cell(i));
  return result;
}

}  // namespace longstraw::core::record
