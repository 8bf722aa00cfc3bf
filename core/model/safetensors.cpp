#include "core/model/safetensors.h"

#include "core/base/atomic_file.h"
#include "core/base/errors.h"
#include "core/model/mapped_file.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <set>

namespace longstraw::core::model {

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");

namespace {

struct DtypeRow {
  StoredDtype dtype;
  std::string_view name;
  int64_t bytes;
  bool floating;
};
constexpr std::array kDtypes{
    DtypeRow{StoredDtype::kF64, "F64", 8, true},        DtypeRow{StoredDtype::kF32, "F32", 4, true},
    DtypeRow{StoredDtype::kF16, "F16", 2, true},        DtypeRow{StoredDtype::kBf16, "BF16", 2, true},
    DtypeRow{StoredDtype::kF8E4m3, "F8_E4M3", 1, true}, DtypeRow{StoredDtype::kI64, "I64", 8, false},
    DtypeRow{StoredDtype::kI32, "I32", 4, false},       DtypeRow{StoredDtype::kI16, "I16", 2, false},
    DtypeRow{StoredDtype::kI8, "I8", 1, false},         DtypeRow{StoredDtype::kU8, "U8", 1, false},
    DtypeRow{StoredDtype::kBool, "BOOL", 1, false},
};

const DtypeRow& row_of(StoredDtype dtype) {
  return *std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeRow& row) { return row.dtype == dtype; });
}

// Product of the shape's sizes times `bytes`, or nothing when it does not fit into 63 bits.
std::optional<int64_t> checked_bytes(const Shape& shape, int64_t bytes) {
  int64_t total = bytes;
  for (const int64_t size : shape) {
    if (size < 0) return std::nullopt;
    if (size != 0 && total > std::numeric_limits<int64_t>::max() / size) return std::nullopt;
    total *= size;
  }
  return total;
}

// nlohmann's DOM keeps the last of two equal keys; a file that names a tensor twice must not pass.
nlohmann::json parse_without_duplicates(std::string_view text, const std::string& file) {
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second) {
      throw FormatError(fmt::format("{}: header: the name \"{}\" occurs twice", file, parsed.get<std::string>()));
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text, watch);
  } catch (const nlohmann::json::exception& error) {
    throw FormatError(fmt::format("{}: header is not JSON: {}", file, error.what()));
  }
}

[[noreturn]] void refuse(const std::string& file, const std::string& tensor, const std::string& what) {
  throw FormatError(fmt::format("{}: tensor {}: {}", file, tensor, what));
}

struct Offsets {
  uint64_t begin = 0;
  uint64_t end = 0;
};

StoredTensor read_entry(const std::string& file, const std::string& name, const nlohmann::json& entry, Offsets& offsets) {
  if (!entry.is_object()) refuse(file, name, fmt::format("got {}, wanted {{dtype, shape, data_offsets}}", entry.dump()));
  StoredTensor tensor{.name = name};
  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string()) refuse(file, name, "dtype is missing or not a string");
  const auto row = std::find_if(kDtypes.begin(), kDtypes.end(),
                                [&](const DtypeRow& r) { return r.name == dtype->get_ref<const std::string&>(); });
  if (row == kDtypes.end()) {
    refuse(file, name, fmt::format("dtype {}: wanted one of F64 F32 F16 BF16 F8_E4M3 I64 I32 I16 I8 U8 BOOL", dtype->dump()));
  }
  tensor.dtype = row->dtype;

  const auto shape = entry.find("shape");
  if (shape == entry.end() || !shape->is_array()) refuse(file, name, "shape is missing or not a list");
  for (const auto& size : *shape) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > uint64_t(std::numeric_limits<int64_t>::max())) {
      refuse(file, name, fmt::format("shape {}: wanted whole numbers >= 0", shape->dump()));
    }
    tensor.shape.push_back(size.get<int64_t>());
  }

  const auto range = entry.find("data_offsets");
  if (range == entry.end() || !range->is_array() || range->size() != 2 || !(*range)[0].is_number_unsigned() ||
      !(*range)[1].is_number_unsigned()) {
    refuse(file, name, "data_offsets is missing or not [begin, end]");
  }
  offsets = {(*range)[0].get<uint64_t>(), (*range)[1].get<uint64_t>()};
  if (offsets.end < offsets.begin) {
    refuse(file, name, fmt::format("data_offsets [{}, {}]: end before begin", offsets.begin, offsets.end));
  }
  const auto wanted = checked_bytes(tensor.shape, row->bytes);
  if (!wanted) refuse(file, name, fmt::format("shape {} is too large", to_string(tensor.shape)));
  if (offsets.end - offsets.begin != uint64_t(*wanted)) {
    refuse(file, name,
           fmt::format("data_offsets [{}, {}] hold {} bytes, shape {} of {} wants {}", offsets.begin, offsets.end,
                       offsets.end - offsets.begin, to_string(tensor.shape), row->name, *wanted));
  }
  return tensor;
}

template <class Bits>
int64_t first_with_exponent(std::span<const std::byte> bytes, Bits exponent) {
  const int64_t count = int64_t(bytes.size() / sizeof(Bits));
  constexpr int64_t kBlock = 2048;  // small enough for the cache, large enough for the inner loop to be vectorised
  std::array<Bits, kBlock> block;
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t n = std::min(kBlock, count - start);
    std::memcpy(block.data(), bytes.data() + start * sizeof(Bits), n * sizeof(Bits));
    Bits bad = 0;
    for (int64_t i = 0; i < n; ++i) bad |= Bits((block[i] & exponent) == exponent);
    if (!bad) continue;
    for (int64_t i = 0; i < n; ++i) {
      if ((block[i] & exponent) == exponent) return start + i;
    }
  }
  return -1;
}

}  // namespace

std::string_view name_of(StoredDtype dtype) { return row_of(dtype).name; }
int64_t bytes_per_element(StoredDtype dtype) { return row_of(dtype).bytes; }
bool is_floating(StoredDtype dtype) { return row_of(dtype).floating; }

std::string to_string(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

int64_t element_count(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path), mapping_(std::make_shared<const MappedFile>(path)) {
  const std::string file = path.string();
  const auto all = mapping_->bytes();
  uint64_t header_bytes = 0;
  if (all.size() < sizeof(header_bytes)) {
    throw FormatError(
        fmt::format("{}: not a safetensors file: {} bytes, the length of the header alone takes 8", file, all.size()));
  }
  std::memcpy(&header_bytes, all.data(), sizeof(header_bytes));
  if (header_bytes > all.size() - sizeof(header_bytes)) {
    throw FormatError(fmt::format("{}: header of {} bytes is longer than the file ({} bytes): truncated, or not a safetensors file",
                                  file, header_bytes, all.size()));
  }
  const auto data = all.subspan(sizeof(header_bytes) + header_bytes);
  const std::string_view text(reinterpret_cast<const char*>(all.data()) + sizeof(header_bytes), header_bytes);
  const nlohmann::json header = parse_without_duplicates(text, file);
  if (!header.is_object()) throw FormatError(fmt::format("{}: header is not a JSON object", file));

  std::vector<std::pair<Offsets, StoredTensor>> entries;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) throw FormatError(fmt::format("{}: __metadata__ is not a JSON object", file));
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) throw FormatError(fmt::format("{}: __metadata__: {} is not a string", file, key));
        metadata_[key] = value.get<std::string>();
      }
      continue;
    }
    Offsets offsets;
    StoredTensor tensor = read_entry(file, name, entry, offsets);
    entries.emplace_back(offsets, std::move(tensor));
  }
  // By begin, then by end: a tensor without elements may share its begin with the next one.
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.begin, a.first.end) < std::pair(b.first.begin, b.first.end);
  });
  uint64_t expected = 0;
  for (auto& [offsets, tensor] : entries) {
    if (offsets.begin != expected) {
      refuse(file, tensor.name,
             fmt::format("begins at byte {}, {} the tensor before it, which ends at {}", offsets.begin,
                         offsets.begin < expected ? "inside" : "leaving a gap after", expected));
    }
    if (offsets.end > data.size()) {
      refuse(file, tensor.name,
             fmt::format("ends at byte {} of the data, the file has only {}: truncated", offsets.end, data.size()));
    }
    tensor.bytes = data.subspan(offsets.begin, offsets.end - offsets.begin);
    expected = offsets.end;
    tensors_.push_back(std::move(tensor));
  }
  if (expected != data.size()) {
    throw FormatError(fmt::format("{}: {} bytes after the last tensor", file, data.size() - expected));
  }
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::find_if(tensors_.begin(), tensors_.end(), [&](const StoredTensor& t) { return t.name == name; });
  return found == tensors_.end() ? nullptr : &*found;
}

int64_t first_non_finite(const StoredTensor& tensor) {
  // A float is NaN or infinite exactly when all bits of its exponent are set.
  switch (tensor.dtype) {
    case StoredDtype::kF64: return first_with_exponent<uint64_t>(tensor.bytes, 0x7ff0000000000000ull);
    case StoredDtype::kF32: return first_with_exponent<uint32_t>(tensor.bytes, 0x7f800000u);
    case StoredDtype::kF16: return first_with_exponent<uint16_t>(tensor.bytes, 0x7c00);
    case StoredDtype::kBf16: return first_with_exponent<uint16_t>(tensor.bytes, 0x7f80);
    // All other bits too: float8_e4m3fn has one NaN a sign and no infinity.
    case StoredDtype::kF8E4m3: return first_with_exponent<uint8_t>(tensor.bytes, 0x7f);
    default: return -1;
  }
}

void write_safetensors(const std::filesystem::path& path, const std::vector<StoredTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const StoredTensor& tensor : tensors) {
    const auto wanted = checked_bytes(tensor.shape, bytes_per_element(tensor.dtype));
    if (!wanted || uint64_t(*wanted) != tensor.bytes.size()) {
      throw ConfigError(fmt::format("{}: tensor {}: {} bytes do not fit shape {} of {}", path.string(), tensor.name,
                                    tensor.bytes.size(), to_string(tensor.shape), name_of(tensor.dtype)));
    }
    if (tensor.name == "__metadata__" || header.contains(tensor.name)) {
      throw ConfigError(fmt::format("{}: tensor {}: the name occurs twice or is reserved", path.string(), tensor.name));
    }
    header[tensor.name] = {
        {"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // keeps the first tensor aligned for readers that map the file
  const uint64_t header_bytes = text.size();

  AtomicFile file(path);
  file.write({reinterpret_cast<const char*>(&header_bytes), sizeof header_bytes});
  file.write(text);
  for (const StoredTensor& tensor : tensors) file.write({reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()});
  file.commit();
}

}  // namespace longstraw::core::model
