#pragma once
// What config.json says of a Qwen3-Next or Qwen3.5 model.

#include "core/model/families/common.h"
#include "core/model/shapes.h"

#include <vector>

namespace longstraw::core::model::qwen3_next {

struct Config {
  Architecture architecture;
  DeltaRuleShape delta_rule;
  std::vector<bool> attention;  // by layer: attention, else the delta rule
  std::vector<bool> sparse;     // by layer: experts, else a dense MLP
  ExpertsShape experts;
  bool normalised_routing = true;
};

Config read_qwen3_next(const JsonReader& config);
Config read_qwen3_5(const JsonReader& config, bool moe);
// The text model is the object text_config. An output weight tied in one place and not in the other is refused.
Config read_qwen3_5_multimodal(const JsonReader& config, bool moe);

}  // namespace longstraw::core::model::qwen3_next
