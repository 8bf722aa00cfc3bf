#include "core/model/mapped_file.h"

#include "core/base/errors.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace longstraw::core::model {

MappedFile::MappedFile(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    const std::string message = fmt::format("{}: {}", path.string(), std::strerror(errno));
    if (errno == ENOENT || errno == ENOTDIR) throw FormatError(message);
    throw IoError(message);
  }
  struct stat status {};
  if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor);
    throw FormatError(fmt::format("{}: not a regular file", path.string()));
  }
  size_ = size_t(status.st_size);
  if (size_ > 0) {
    void* data = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (data == MAP_FAILED) {
      const std::string reason = std::strerror(errno);
      ::close(descriptor);
      throw IoError(fmt::format("{}: can't be mapped: {}", path.string(), reason));
    }
    data_ = static_cast<const std::byte*>(data);
  }
  ::close(descriptor);  // the mapping keeps the file
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

AtomicFile::AtomicFile(const std::filesystem::path& path) : path_(path) {
  std::string name = path.string() + ".XXXXXX";
  descriptor_ = ::mkstemp(name.data());
  if (descriptor_ < 0) fail("can't be created");
  beside_ = name;
  // mkstemp makes a private file; what replaces `path` should be as readable as any file made here.
  const mode_t mask = ::umask(0);
  ::umask(mask);
  ::fchmod(descriptor_, 0666 & ~mask);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!beside_.empty()) ::unlink(beside_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      fail("can't be written");
    }
    bytes = bytes.subspan(size_t(written));
  }
}

void AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) fail("can't be written");
  const int descriptor = descriptor_;
  descriptor_ = -1;
  if (::close(descriptor) != 0) fail("can't be written");
  if (::rename(beside_.c_str(), path_.c_str()) != 0) fail("can't be replaced");
  beside_.clear();
}

void AtomicFile::fail(const char* what) const {
  throw IoError(fmt::format("{}: {}: {}", path_.string(), what, std::strerror(errno)));
}

}  // namespace longstraw::core::model
