#pragma once
// A file mapped for reading.

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

}  // namespace longstraw::core::model
