#pragma once
// Weights stored as 8-bit floats with one scale a block, as DeepSeek-V3 and others publish them: W of float8_e4m3fn [O, I]
// and W_scale_inv [⌈O/rows⌉, ⌈I/columns⌉]; the weight is stored · scale, the last block of a row or column may be ragged.
// Training runs on the weights that result, in the dtype of the run.

#include "core/model/safetensors.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

namespace longstraw::core::model {

class JsonReader;

struct ScaleBlocks {
  int64_t rows = 128;
  int64_t columns = 128;
  // Shape of the scales of a weight of this shape: its last two dimensions in blocks, those before them as they are.
  Shape scales_of(const Shape& weight) const;
  std::string to_string() const;  // "128 x 128"
};

constexpr std::string_view kScaleSuffix = "_scale_inv";  // after the weight's name

// From config.json's quantization_config: this form (quant_method fp8 with weight_block_size), or no such section. Throws
// FormatError naming file and key for any other: its weights would mean something else.
ScaleBlocks read_scale_blocks(const JsonReader& config);

// stored float8 [..., O, I], scales in any floating dtype -> stored · scale in `dtype`, by way of float32 (of float64 for
// float64, in which the product is exact). No memory beside the result but that of one row of blocks.
at::Tensor dequantized(const at::Tensor& stored, const at::Tensor& scales, const ScaleBlocks& blocks, at::ScalarType dtype);

}  // namespace longstraw::core::model
