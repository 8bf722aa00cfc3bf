#pragma once
// A file that appears whole or not at all: written beside its place, then renamed over it.
//
//   AtomicFile file("report.json");
//   file.write(text);
//   file.commit();
//
// Without commit() (an exception, an early return) the temporary file is removed and what stood at `path` is untouched.
// A `path` that exists and is no regular file (/dev/stdout, a pipe) is written directly. Throws IoError naming the
// path: an unwritable folder, a full disk.

#include <filesystem>
#include <string>
#include <string_view>

namespace longstraw {

class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::string_view bytes);
  void commit();

 private:
  void flush();
  void write_all(std::string_view bytes);
  [[noreturn]] void fail(const char* what) const;

  std::filesystem::path path_;       // as the user named it
  std::filesystem::path target_;     // links followed
  std::filesystem::path temporary_;  // empty: `target_` is written directly
  int file_ = -1;
  std::string buffer_;
};

}  // namespace longstraw
