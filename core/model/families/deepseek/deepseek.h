#pragma once
// Latent attention with a mixture of experts: deepseek_v3, deepseek_v32 (with an indexer in every layer) and glm_moe_dsa
// (GLM-5 to 5.2, where layers may share the selection of one before them). Pre-norm residual blocks,
//   x += latent_attention(rms_norm(x));   x += mlp or experts(rms_norm(x))
// The first layers have an MLP, the rest routed experts, chosen by sigmoid scores plus a constant, and shared ones.
// Prompt state: the rows that blocks/latent_attention.h declares. The layers for multi-token prediction that checkpoints
// carry after the last are not part of the model.

#include "core/model/registry.h"

namespace longstraw::core::model::deepseek {

DecoderParts deepseek_v3(const JsonReader& config);
DecoderParts deepseek_v32(const JsonReader& config);
DecoderParts glm_moe_dsa(const JsonReader& config);

// Names of the layers for multi-token prediction, to be skipped.
CheckpointLayout layout(const Architecture& architecture);

}  // namespace longstraw::core::model::deepseek
