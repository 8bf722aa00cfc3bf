#pragma once
// What `longstraw inspect` says of a checkpoint folder: from config.json alone where there is nothing else, and from the
// headers of the tensor files.

#include "core/model/decoder.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>

namespace longstraw::core::model {

struct ParameterCounts {
  int64_t total = 0;
  // Of those that one token passes through: all but the experts that were not chosen for it.
  int64_t active = 0;
};
ParameterCounts count_parameters(const DecoderParts& parts);

struct DescribeOptions {
  std::optional<int64_t> tokens = {};         // size of a prefix; none: no totals
  std::optional<c10::ScalarType> dtype = {};  // of the run; none: as the weights are stored
};

// Architecture, counts of parameters and experts, files, bytes of prompt state by kind of mixer, and with `tokens` what a
// prefix of as many tokens leaves and what an exact gradient over it takes. The dtype is the one that most of the stored
// numbers have; for a folder without tensor files, and for weights in 8-bit floats, config.json's `dtype` or `torch_dtype`
// (float32, float64, float16 or bfloat16; missing: bfloat16). Throws as read_architecture and Checkpoint do.
nlohmann::ordered_json describe(const std::filesystem::path& folder, const DescribeOptions& options = {});

}  // namespace longstraw::core::model
