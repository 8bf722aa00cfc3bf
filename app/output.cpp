#include "app/output.h"

#include "core/base/atomic_file.h"
#include "core/base/errors.h"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

namespace longstraw::app {
namespace {

namespace fs = std::filesystem;

bool starts_as_hdf5(const fs::path& path) {
  constexpr std::array<char, 8> kSignature{'\x89', 'H', 'D', 'F', '\r', '\n', '\x1a', '\n'};
  std::array<char, 8> start{};
  std::ifstream file(path, std::ios::binary);
  file.read(start.data(), start.size());
  return file.gcount() == std::streamsize(start.size()) && start == kSignature;
}

}  // namespace

void require_writable_file(const fs::path& path) {
  if (path.empty()) throw ConfigError("output: the path is empty");
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) {
    throw IoError(fmt::format("{}: can't be written: there is no folder {}", path.string(), folder.string()));
  }
  AtomicFile(path).write("");  // not committed: nothing remains
}

void require_writable_record(const fs::path& path) {
  require_writable_file(path);
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return;
  if (!fs::is_regular_file(path, ignored)) throw ConfigError(fmt::format("{}: a record needs a regular file", path.string()));
  if (!starts_as_hdf5(path)) throw ConfigError(fmt::format("{}: is there and is no record; it is not overwritten", path.string()));
}

void require_writable_folder(const fs::path& folder) {
  if (folder.empty()) throw ConfigError("output folder: the path is empty");
  std::error_code error;
  fs::create_directories(folder, error);
  if (!fs::is_directory(folder)) {
    throw IoError(
        fmt::format("{}: the folder can't be made: {}", folder.string(), error ? error.message() : "a file is in its place"));
  }
  AtomicFile(folder / "writable").write("");
}

void flush_standard_output() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
    throw IoError(fmt::format("standard output: writing failed: {}", std::strerror(errno)));
  }
}

}  // namespace longstraw::app
