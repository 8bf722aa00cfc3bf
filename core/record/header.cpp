#include "core/record/header.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/base/errors.h"

namespace longstraw::core::record {

using hdf5::Doing;

namespace {

constexpr std::array<const char*, 14> kHeaderNames{"format",        "format_version", "arm",           "config",     "model_sha256",
                                                   "data_sha256",   "dtype",          "device",        "world_size", "seed",
                                                   "torch_version", "git_commit",     "deterministic", "closed"};

}  // namespace

void write_header(hid_t file, const RecordHeader& h, const std::string& where) {
  const auto text = [&](const char* name, const std::string& value) { hdf5::write_attribute(file, name, value, where); };
  text("format", kFormat);
  hdf5::write_attribute(file, "format_version", kFormatVersion, where);
  text("arm", h.arm);
  text("config", h.config_yaml);
  text("model_sha256", h.model_sha256);
  text("data_sha256", h.data_sha256);
  text("dtype", h.dtype);
  text("device", h.device);
  hdf5::write_attribute(file, "world_size", h.world_size, where);
  hdf5::write_attribute(file, "seed", h.seed, where);
  text("torch_version", h.torch_version);
  text("git_commit", h.git_commit);
  hdf5::write_attribute(file, "deterministic", std::int64_t{h.deterministic}, where);
  hdf5::write_attribute(file, "closed", std::int64_t{0}, where);
  for (const auto& [name, value] : h.extra) {
    if (hdf5::has_attribute(file, name)) throw ConfigError(fmt::format("{}: attribute {} is the header's own", where, name));
    text(name.c_str(), value);
  }
}

void replace_header(hid_t file, const RecordHeader& header, const std::string& where) {
  for (const auto& name : hdf5::attribute_names(file, where)) {
    hdf5::check(H5Adelete(file, name.c_str()), Doing::kWriting, where + ": attribute " + name);
  }
  write_header(file, header, where);
}

RecordHeader read_header(hid_t file, const std::string& where) {
  const auto text = [&](const char* name) { return hdf5::read_text_attribute(file, name, where); };
  if (!hdf5::has_attribute(file, "format") || text("format") != kFormat) {
    throw FormatError(fmt::format("{}: is an HDF5 file but no record (attribute format is not {})", where, kFormat));
  }
  const std::int64_t version = hdf5::read_int_attribute(file, "format_version", where);
  if (version < 1 || version > kFormatVersion) {
    throw FormatError(fmt::format("{}: format_version {}, this program reads up to {}", where, version, kFormatVersion));
  }
  RecordHeader h;
  h.arm = text("arm");
  h.config_yaml = text("config");
  h.model_sha256 = text("model_sha256");
  h.data_sha256 = text("data_sha256");
  h.dtype = text("dtype");
  h.device = text("device");
  h.world_size = hdf5::read_int_attribute(file, "world_size", where);
  h.seed = hdf5::read_int_attribute(file, "seed", where);
  h.torch_version = text("torch_version");
  h.git_commit = text("git_commit");
  h.deterministic = hdf5::read_int_attribute(file, "deterministic", where) != 0;
  for (const auto& name : hdf5::attribute_names(file, where)) {
    const bool own = std::any_of(kHeaderNames.begin(), kHeaderNames.end(), [&](const char* n) { return name == n; });
    if (!own) h.extra[name] = text(name.c_str());
  }
  return h;
}

std::int64_t step_number(const std::string& name, const std::string& where) {
  const bool digits =
      !name.empty() && name.size() < 19 && std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits) throw FormatError(fmt::format("{}: /steps/{}: expected a step number", where, name));
  return std::stoll(name);
}

void check_same_inputs(const RecordHeader& there, const RecordHeader& wanted, const std::string& where) {
  const auto check = [&](const char* name, const auto& has, const auto& wants) {
    if (has == wants) return;
    throw FormatError(fmt::format("{}: attribute {}: {}, but the run that goes on with it has {}", where, name, has, wants));
  };
  check("arm", there.arm, wanted.arm);
  check("model_sha256", there.model_sha256, wanted.model_sha256);
  check("data_sha256", there.data_sha256, wanted.data_sha256);
  check("seed", there.seed, wanted.seed);
  check("dtype", there.dtype, wanted.dtype);
}

}  // namespace longstraw::core::record
