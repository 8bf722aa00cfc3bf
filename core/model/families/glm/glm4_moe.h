#pragma once
// GLM-4.5, 4.6, 4.7 (model_type glm4_moe): grouped attention with a partly rotated head, and a mixture of experts with
// DeepSeek's routing from layer first_k_dense_replace on, a dense MLP before.

#include "core/model/registry.h"

namespace longstraw::core::model::glm {

DecoderParts glm4_moe(const JsonReader& config);
// The published files hold one layer more than the model has, for the prediction of further tokens; it is skipped.
CheckpointLayout glm4_moe_layout(const Architecture& architecture);

}  // namespace longstraw::core::model::glm
