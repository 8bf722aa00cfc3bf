#include "core/base/atomic_file.h"

#include "core/base/errors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace longstraw {
namespace {

// Two writers of one process to one path must not share a temporary file.
std::atomic<unsigned> writers{0};

}  // namespace

AtomicFile::AtomicFile(const std::filesystem::path& path) : path_(path), target_(path) {
  std::error_code ignored;
  if (std::filesystem::is_symlink(path, ignored)) {
    const auto followed = std::filesystem::weakly_canonical(path, ignored);
    if (!ignored) target_ = followed;
  }
  const auto status = std::filesystem::status(target_, ignored);
  if (std::filesystem::is_directory(status)) throw IoError(fmt::format("{}: is a folder, wanted a file to write", path_.string()));
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    file_ = ::open(target_.c_str(), O_WRONLY | O_CLOEXEC);
  } else {
    temporary_ =
        target_.parent_path() / fmt::format(".{}.{}-{}.tmp", target_.filename().string(), ::getpid(), writers.fetch_add(1));
    file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  }
  if (file_ < 0) {
    temporary_.clear();  // not ours to remove
    fail("can't be written");
  }
}

AtomicFile::~AtomicFile() {
  if (file_ >= 0) ::close(file_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::string_view bytes) {
  constexpr std::size_t kFlushAt = 1 << 20;
  if (bytes.size() >= kFlushAt) {  // a tensor: no copy of it
    flush();
    write_all(bytes);
    return;
  }
  buffer_ += bytes;
  if (buffer_.size() >= kFlushAt) flush();
}

void AtomicFile::flush() {
  write_all(buffer_);
  buffer_.clear();
}

void AtomicFile::write_all(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(file_, bytes.data(), bytes.size());
    if (count < 0 && errno != EINTR) fail("writing failed");
    if (count > 0) bytes.remove_prefix(static_cast<std::size_t>(count));
  }
}

void AtomicFile::commit() {
  flush();
  // A rename may reach the disk before the data does: after a power cut the file would be there, and empty.
  if (!temporary_.empty() && ::fsync(file_) != 0) fail("writing failed");
  const int file = file_;
  file_ = -1;
  if (::close(file) != 0) fail("writing failed");
  if (temporary_.empty()) return;
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) fail("can't be put in its place");
  temporary_.clear();
}

void AtomicFile::fail(const char* what) const {
  throw IoError(fmt::format("{}: {}: {}", path_.string(), what, std::strerror(errno)));
}

}  // namespace longstraw
