#include "core/model/families/mamba/mixer_config.h"

#include <fmt/format.h>

#include <limits>

namespace longstraw::core::model::mamba {

void read_time_step_limit(const JsonReader& config, StateSpaceShape& shape) {
  shape.time_step_min = 0.0;
  shape.time_step_max = std::numeric_limits<double>::infinity();
  if (!config.has("time_step_limit")) return;
  const std::vector<double> limit = config.numbers("time_step_limit");
  if (limit.size() != 2 || limit[0] > limit[1] || limit[1] < 0) {
    config.refuse("time_step_limit", "two numbers, the least and the greatest time step");
  }
  shape.time_step_min = limit[0];
  shape.time_step_max = limit[1];
}

void check_groups(const JsonReader& config, std::string_view groups_key, const StateSpaceShape& shape) {
  if (shape.heads % shape.groups == 0) return;
  config.refuse(groups_key, fmt::format("a divisor of the {} heads of a mixer; it is {}", shape.heads, shape.groups));
}

StateSpaceShape read_hybrid_mixer(const JsonReader& config, int64_t width, std::string_view width_key) {
  StateSpaceShape shape;
  shape.heads = config.positive("mamba_n_heads", 128);
  if (width % shape.heads != 0) {
    config.refuse("mamba_n_heads", fmt::format("a divisor of the mixer's width {} ({}); it is {}", width, width_key, shape.heads));
  }
  const bool derived = !config.has("mamba_d_head") || config.json().at("mamba_d_head") == "auto";
  shape.head_dim = derived ? width / shape.heads : config.positive("mamba_d_head");
  if (shape.head_dim * shape.heads != width) {
    config.refuse("mamba_d_head", fmt::format("\"auto\" or {}: {} heads in the mixer's width {} ({})", width / shape.heads,
                                              shape.heads, width, width_key));
  }
  shape.groups = config.positive("mamba_n_groups", 1);
  shape.state = config.positive("mamba_d_state", 256);
  shape.kernel = config.positive("mamba_d_conv", 4);
  shape.convolution_bias = config.flag("mamba_conv_bias", true);
  shape.input_bias = shape.output_bias = config.flag("mamba_proj_bias", false);
  read_time_step_limit(config, shape);
  check_groups(config, "mamba_n_groups", shape);
  return shape;
}

std::vector<std::string> with_new_names(std::vector<std::string> layer_types) {
  for (std::string& type : layer_types) {
    if (type == "mamba") type = "linear_attention";
    if (type == "attention") type = "full_attention";
  }
  return layer_types;
}

}  // namespace longstraw::core::model::mamba
