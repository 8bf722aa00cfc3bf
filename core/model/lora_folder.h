#pragma once
// A folder that PEFT wrote, or that PEFT reads: adapter_config.json and adapter_model.safetensors.

#include "core/model/registry.h"
#include "core/model/safetensors.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace longstraw::core::model {

struct AdapterFolder {
  struct Pair {
    at::Tensor a_rI, b_Or;  // as stored
  };
  std::string file, config_file;
  int64_t rank = 0;
  double alpha = 0.0;
  std::map<std::string, Pair> pairs;  // by module, as the decoder's family calls it
  std::vector<std::string> notes;     // what a user should know

  // FormatError naming the tensor unless the module's pair has these shapes.
  void check_shapes(const std::string& module, const Shape& a, const Shape& b) const;
};

// Module names may have any of the layout's prefixes. Throws FormatError for a missing file or key, for a tensor that is no A or B,
// an A without B, values that are not finite, and for what is more than W + (lora_alpha / r) B A.
AdapterFolder read_adapter_folder(const std::filesystem::path& folder, const CheckpointLayout& layout);

}  // namespace longstraw::core::model
