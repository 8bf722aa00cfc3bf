#pragma once
// What config.json says of a model with latent attention, checked, with the defaults of the configuration classes of
// Hugging Face transformers.

#include "core/model/architecture.h"
#include "core/model/blocks/experts.h"
#include "core/model/json_reader.h"
#include "core/model/shapes.h"

#include <optional>
#include <vector>

namespace longstraw::core::model::deepseek {

struct LayerPlan {
  bool has_experts = false;
  bool has_indexer = false;  // of its own; where the model has any
};

struct Config {
  Architecture architecture;
  LatentAttentionShape attention;
  std::optional<IndexerShape> indexer;  // none: attention to all tokens
  ExpertsShape experts;
  Routing routing;
  std::vector<LayerPlan> layers;
};

// FormatError naming file, key, got and wanted, as read_architecture.
Config read_deepseek_v3(const JsonReader& config);
Config read_deepseek_v32(const JsonReader& config);
Config read_glm_moe_dsa(const JsonReader& config);

}  // namespace longstraw::core::model::deepseek
