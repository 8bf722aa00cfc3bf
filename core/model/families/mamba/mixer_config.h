#pragma once
// What the readers of the families with Mamba-2 mixers have in common. Everything refused is a FormatError naming file,
// key, got and wanted.

#include "core/model/json_reader.h"
#include "core/model/shapes.h"

#include <string>
#include <vector>

namespace longstraw::core::model::mamba {

// time_step_limit: [least, greatest], the greatest may be infinity; missing or null: [0, infinity].
void read_time_step_limit(const JsonReader& config, StateSpaceShape& shape);

// Groups that divide the heads evenly; `groups_key` is blamed.
void check_groups(const JsonReader& config, std::string_view groups_key, const StateSpaceShape& shape);

// The mamba_* keys of bamba, granitemoehybrid and falcon_h1. `width` is heads · head_dim, which the class derives from
// `width_key`; norm over all heads.
StateSpaceShape read_hybrid_mixer(const JsonReader& config, int64_t width, std::string_view width_key);

// "linear_attention" (or "mamba", as it was called) and "full_attention" ("attention"), as the newer names.
std::vector<std::string> with_new_names(std::vector<std::string> layer_types);

}  // namespace longstraw::core::model::mamba
