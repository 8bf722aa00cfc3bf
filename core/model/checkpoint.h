#pragma once
// The tensor files of a Hugging Face checkpoint folder: model.safetensors, or the shards that
// model.safetensors.index.json names.

#include "core/model/safetensors.h"

#include <ATen/core/Tensor.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace longstraw::core::model {

class Checkpoint {
 public:
  struct Entry {
    const SafetensorsFile* file;
    const StoredTensor* tensor;
  };

  // Opens and checks the headers; reads no weights. Throws FormatError: no tensor file, a missing shard, a tensor that
  // is in the index but not in its shard or the other way round, a tensor in two shards.
  explicit Checkpoint(const std::filesystem::path& folder);

  const std::filesystem::path& folder() const { return folder_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }
  const std::map<std::string, Entry>& tensors() const { return tensors_; }  // by name

  // SHA-256 over every tensor in the order of names: name, dtype, shape and bytes. The same for any sharding.
  std::string sha256() const;

 private:
  void add(const SafetensorsFile& file);
  std::filesystem::path folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, Entry> tensors_;
};

at::ScalarType scalar_type(StoredDtype dtype);
StoredDtype stored_dtype(at::ScalarType type);  // throws ConfigError for one that safetensors does not have

// A copy on the CPU in the stored dtype. Throws FormatError naming file, tensor and index if a value is NaN or infinite.
at::Tensor read_tensor(const SafetensorsFile& file, const StoredTensor& tensor);

}  // namespace longstraw::core::model
