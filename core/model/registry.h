#pragma once
// Which model_type is computed by which family. A new family is one folder under families/ and a line in registry.cpp.

#include "core/model/decoder.h"
#include "core/model/json_reader.h"
#include "core/model/safetensors.h"

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::core::model {

// A parameter that a model of this architecture has, under its checkpoint name.
struct ParameterShape {
  std::string name;
  Shape shape;
};

// What one layer keeps of each token (or once, for a recurrent state) for later tokens, in numbers.
struct LayerState {
  std::string kind;  // "full attention", "sliding window of 4096"
  int64_t numbers_per_token = 0;
};

using ParameterMap = std::map<std::string, std::shared_ptr<Parameter>>;

// All that a decoder is made from, read and checked.
struct DecoderParts {
  Architecture architecture;
  std::vector<std::shared_ptr<Parameter>> parameters;  // in the order of the family's list
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  std::string sha256;
};

struct Family {
  std::string model_type;
  Architecture (*read)(const JsonReader& config);
  std::vector<ParameterShape> (*parameters)(const Architecture& architecture);  // in the order of the layers
  std::vector<LayerState> (*states)(const Architecture& architecture);          // one a layer
  std::unique_ptr<Decoder> (*build)(DecoderParts parts);
};

// Throws ConfigError, naming `file`, for a model_type that no family computes.
const Family& family_of(const std::string& model_type, const std::string& file);

}  // namespace longstraw::core::model
