#pragma once
// Which model_type is put together by which family. A new family is one folder under families/ and a line in registry.cpp.

#include "core/model/decoder.h"
#include "core/model/json_reader.h"

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace longstraw::core::model {

// How a published checkpoint's tensor names differ from the model's own.
struct CheckpointLayout {
  // A tensor whose name starts with `from` has the name that starts with `to` instead.
  struct Prefix {
    std::string from, to;
  };
  std::vector<Prefix> prefixes = {};
  // Where Hugging Face's class calls its modules otherwise than the parameters are called: what names of adapters are made of.
  std::vector<Prefix> modules = {};
  // Tensors that belong to parts we don't run (a vision tower, multi-token prediction): names that start so are skipped.
  std::vector<std::string> skipped = {};
};

struct Family {
  std::string model_type;
  DecoderParts (*build)(const JsonReader& config);
  CheckpointLayout (*layout)(const Architecture& architecture) = nullptr;  // null: as the model's own names
};

// Throws ConfigError, naming `file`, for a model_type that no family computes.
const Family& family_of(const std::string& model_type, const std::string& file);
std::vector<std::string> model_types();

// The decoder of folder/config.json without its weights. Throws as read_architecture.
DecoderParts read_parts(const std::filesystem::path& folder);

}  // namespace longstraw::core::model
