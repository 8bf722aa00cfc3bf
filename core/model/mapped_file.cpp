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

}  // namespace longstraw::core::model
