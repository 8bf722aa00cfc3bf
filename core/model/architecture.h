#pragma once
// What config.json says of a model, checked, with the defaults that Hugging Face transformers would fill in.

#include "core/model/block_scaled.h"
#include "core/model/rotary.h"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::model {

struct Architecture {
  std::string model_type;
  int64_t layers = 0;
  int64_t hidden = 0;        // D
  int64_t heads = 0;         // H, of queries
  int64_t kv_heads = 0;      // G, of keys and values; divides H
  int64_t head_dim = 0;      // d; H · d need not be D
  int64_t intermediate = 0;  // of the MLP
  int64_t vocab = 0;         // V
  double norm_eps = 1e-6;
  bool tied_embeddings = false;  // the output weight is the embedding
  bool query_key_value_bias = false;
  bool attention_output_bias = false;
  bool mlp_bias = false;
  bool query_key_norm = false;                 // RMSNorm of each query and key head before the rotation
  std::vector<std::optional<int64_t>> window;  // by layer: key j is visible to query i iff i - window < j <= i
  Rotary rotary;
  // After the last layer, for multi-token prediction: in the checkpoint, not part of the model.
  int64_t prediction_layers = 0;
  ScaleBlocks scale_blocks;      // of weights that the checkpoint stores in 8-bit floats
  std::vector<int64_t> eos_ids;  // generation_config.json's where it names some, else config.json's; may be empty
};

// Reads folder/config.json. Throws FormatError naming file, key, got and wanted for a key the computation depends on
// that is missing, of the wrong type or outside its range, and for a feature that is not supported; ConfigError for an
// unknown model_type, with those that are known and the nearest.
Architecture read_architecture(const std::filesystem::path& folder);

}  // namespace longstraw::core::model
