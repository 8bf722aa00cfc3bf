#include "core/record/file_io.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace longstraw::core::record {
namespace {

constexpr std::size_t kMaxTransfer = std::size_t{1} << 30;  // one write(2) moves less than 2 GiB

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

std::string reason(int error) { return std::strerror(error); }

bool write_all(int fd, const void* data, std::size_t size, std::uint64_t offset) {
  const auto* bytes = static_cast<const std::uint8_t*>(data);
  while (size > 0) {
    const ssize_t done = ::pwrite(fd, bytes, std::min(size, kMaxTransfer), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    bytes += done;
    size -= static_cast<std::size_t>(done);
    offset += static_cast<std::uint64_t>(done);
  }
  return true;
}

bool read_all(int fd, void* data, std::size_t size, std::uint64_t offset) {
  auto* bytes = static_cast<std::uint8_t*>(data);
  while (size > 0) {
    const ssize_t done = ::pread(fd, bytes, std::min(size, kMaxTransfer), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return false;
    if (done == 0) {
      std::memset(bytes, 0, size);
      return true;
    }
    bytes += done;
    size -= static_cast<std::size_t>(done);
    offset += static_cast<std::uint64_t>(done);
  }
  return true;
}

void sync_folder(const std::string& path) {
  auto folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) folder = ".";
  const Descriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() >= 0) ::fsync(fd.get());
}

bool locked_by_another(int fd, int kind) { return ::flock(fd, kind | LOCK_NB) != 0 && errno == EWOULDBLOCK; }

}  // namespace longstraw::core::record
