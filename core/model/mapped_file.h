#pragma once
// RAII over two ways to use a file: mapped for reading, and written whole or not at all.

#include <cstddef>
#include <filesystem>
#include <span>

namespace longstraw::core::model {

// A whole file mapped read-only. Throws FormatError if it is missing or no regular file, IoError if it can't be read.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Bytes go into a file beside `path`; commit() syncs it and renames it over `path`. Without commit() (an exception on
// the way) it is removed and `path` stays what it was. Throws IoError naming `path` and the system's reason.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  void write(std::span<const std::byte> bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* what) const;
  std::filesystem::path path_;
  std::filesystem::path beside_;
  int descriptor_ = -1;
};

}  // namespace longstraw::core::model
