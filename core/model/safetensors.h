#pragma once
// The safetensors format, read and written without LibTorch. A file is
//   8 bytes: length N of the header, little-endian · N bytes: JSON {name: {dtype, shape, data_offsets: [begin, end]}}
//   · the tensors' bytes, little-endian, row-major, in the order of their offsets, without gaps
// Every claim of the header is checked before a tensor is handed out.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::core::model {

class MappedFile;

enum class StoredDtype { kF64, kF32, kF16, kBf16, kF8E4m3, kI64, kI32, kI16, kI8, kU8, kBool };
std::string_view name_of(StoredDtype dtype);  // as safetensors spells it: "F32"
int64_t bytes_per_element(StoredDtype dtype);
bool is_floating(StoredDtype dtype);

using Shape = std::vector<int64_t>;
std::string to_string(const Shape& shape);  // "[2, 3]"
int64_t element_count(const Shape& shape);

// A tensor inside an open file; its bytes live as long as the file object, and may be at any alignment.
struct StoredTensor {
  std::string name;
  StoredDtype dtype = StoredDtype::kF32;
  Shape shape = {};
  std::span<const std::byte> bytes = {};
};

// One file, mapped into memory.
class SafetensorsFile {
 public:
  // Throws FormatError, naming the file (and the tensor), if it can't be opened, is truncated, its header is not what
  // the format asks for, a dtype is unknown, a shape does not fit its bytes, or tensors overlap or leave gaps.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // in the order of their offsets
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const StoredTensor* find(std::string_view name) const;  // null when it has none of that name

 private:
  std::filesystem::path path_;
  std::shared_ptr<const MappedFile> mapping_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Index of the first element that is NaN or infinite, or -1.
int64_t first_non_finite(const StoredTensor& tensor);

// Writes `tensors` in the order given, whole or not at all: into a file beside `path`, synced, then renamed over it.
// Throws IoError (no permission, disk full), leaving an existing file untouched; ConfigError for a name that occurs
// twice or bytes that do not fit the shape.
void write_safetensors(const std::filesystem::path& path, const std::vector<StoredTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace longstraw::core::model
