#pragma once
// POSIX files with what their users forget: interrupted and partial transfers, locks, names that must survive a power cut.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace longstraw::core::record {

// Owns an open file descriptor; -1: none.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }

 private:
  int fd_;
};

// The name of an errno value, as message text.
std::string reason(int error);
// False with errno set when not everything could be written.
bool write_all(int fd, const void* data, std::size_t size, std::uint64_t offset);
// Bytes past the end of the file read as zero. False with errno set on a failure.
bool read_all(int fd, void* data, std::size_t size, std::uint64_t offset);
// Makes a change of names in the file's folder durable.
void sync_folder(const std::string& path);
// Tries the lock (LOCK_SH or LOCK_EX). A file system without locks (some network mounts) leaves it to the user not to run
// two writers.
bool locked_by_another(int fd, int kind);

}  // namespace longstraw::core::record
