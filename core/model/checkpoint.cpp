#include "core/model/checkpoint.h"

#include "core/base/errors.h"
#include "core/base/sha256.h"
#include "core/model/json_reader.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <array>
#include <cstring>
#include <set>

namespace longstraw::core::model {

namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

struct Types {
  StoredDtype stored;
  at::ScalarType scalar;
};
constexpr std::array kTypes{Types{StoredDtype::kF64, at::kDouble},
                            Types{StoredDtype::kF32, at::kFloat},
                            Types{StoredDtype::kF16, at::kHalf},
                            Types{StoredDtype::kBf16, at::kBFloat16},
                            Types{StoredDtype::kF8E4m3, at::kFloat8_e4m3fn},
                            Types{StoredDtype::kI64, at::kLong},
                            Types{StoredDtype::kI32, at::kInt},
                            Types{StoredDtype::kI16, at::kShort},
                            Types{StoredDtype::kI8, at::kChar},
                            Types{StoredDtype::kU8, at::kByte},
                            Types{StoredDtype::kBool, at::kBool}};

// Tensor name -> shard, in the order of shards' names.
std::map<std::string, std::string> read_weight_map(const JsonReader& index) {
  std::map<std::string, std::string> weight_map;
  const JsonReader section = index.section("weight_map");
  for (const auto& [name, value] : section.json().items()) {
    const std::string shard = section.text(name);
    // An index is data from elsewhere: it may name files of this folder only.
    if (shard.empty() || shard.find('/') != std::string::npos || shard == "." || shard == "..") {
      section.refuse(name, "the name of a file in the same folder");
    }
    weight_map[name] = shard;
  }
  return weight_map;
}

}  // namespace

Checkpoint::Checkpoint(const std::filesystem::path& folder) : folder_(folder) {
  if (!std::filesystem::is_directory(folder)) throw FormatError(fmt::format("{}: not a folder", folder.string()));
  const auto single = folder / kSingleFile;
  const auto index = folder / kIndexFile;
  if (std::filesystem::exists(single)) {
    files_.emplace_back(single);
    add(files_.back());
    return;
  }
  if (!std::filesystem::exists(index)) {
    throw FormatError(fmt::format("{}: has neither {} nor {}", folder.string(), kSingleFile, kIndexFile));
  }
  const auto weight_map = read_weight_map(read_json(index.string()));
  std::set<std::string> shards;
  for (const auto& [name, shard] : weight_map) shards.insert(shard);
  files_.reserve(shards.size());
  for (const std::string& shard : shards) {
    if (!std::filesystem::exists(folder / shard)) {
      throw FormatError(fmt::format("{}: names the shard {}, which is not there", index.string(), shard));
    }
    files_.emplace_back(folder / shard);
    add(files_.back());
  }
  for (const auto& [name, shard] : weight_map) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end() || found->second.file->path().filename() != shard) {
      throw FormatError(
          fmt::format("{}: tensor {}: not in {}, where {} says it is", (folder / shard).string(), name, shard, kIndexFile));
    }
  }
  for (const auto& [name, entry] : tensors_) {
    if (!weight_map.contains(name)) {
      throw FormatError(fmt::format("{}: tensor {}: not in {}", entry.file->path().string(), name, kIndexFile));
    }
  }
}

void Checkpoint::add(const SafetensorsFile& file) {
  for (const StoredTensor& tensor : file.tensors()) {
    const auto [existing, inserted] = tensors_.try_emplace(tensor.name, Entry{&file, &tensor});
    if (!inserted) {
      throw FormatError(
          fmt::format("{}: tensor {}: also in {}", file.path().string(), tensor.name, existing->second.file->path().string()));
    }
  }
}

std::string Checkpoint::sha256() const {
  Sha256 hash;
  for (const auto& [name, entry] : tensors_) {
    // The length before the text keeps two different lists from running together into the same bytes.
    const std::string head = fmt::format("{} {} {}", name, name_of(entry.tensor->dtype), to_string(entry.tensor->shape));
    hash.update(fmt::format("{}:{}", head.size(), head));
    hash.update(entry.tensor->bytes.data(), entry.tensor->bytes.size());
  }
  return hash.hex();
}

at::ScalarType scalar_type(StoredDtype dtype) {
  for (const Types& types : kTypes) {
    if (types.stored == dtype) return types.scalar;
  }
  throw FormatError("unknown dtype");
}

StoredDtype stored_dtype(at::ScalarType type) {
  for (const Types& types : kTypes) {
    if (types.scalar == type) return types.stored;
  }
  throw ConfigError(fmt::format("dtype {}: safetensors has none for it", c10::toString(type)));
}

at::Tensor read_tensor(const SafetensorsFile& file, const StoredTensor& tensor) {
  if (const int64_t index = first_non_finite(tensor); index >= 0) {
    throw FormatError(fmt::format("{}: tensor {}: element {} of {} is not a finite number", file.path().string(), tensor.name,
                                  index, element_count(tensor.shape)));
  }
  // A copy: the bytes in the file may be unaligned, and weights are written to by an optimizer.
  at::Tensor copy = at::empty(tensor.shape, scalar_type(tensor.dtype));
  if (!tensor.bytes.empty()) std::memcpy(copy.data_ptr(), tensor.bytes.data(), tensor.bytes.size());
  return copy;
}

}  // namespace longstraw::core::model
