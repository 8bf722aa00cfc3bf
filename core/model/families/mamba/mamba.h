#pragma once
// Decoders with Mamba-2 mixers (blocks/state_space.h), alone or beside attention. Pre-norm residual blocks, x += f(norm(x)):
//
//   mamba2            Mamba-2 in every layer, no MLP; the residual is kept wide with residual_in_fp32
//   nemotron_h        one of Mamba-2, attention without positions, MLP (relu²) or experts in a layer
//   bamba             Mamba-2 or attention (half of each head rotated), then an MLP
//   granitemoehybrid  Mamba-2 or attention (rotated or without positions), then an MLP, beside experts where it has some
//   falcon_h1         Mamba-2 and attention side by side in every layer, then an MLP
//
// Configurations as those of Hugging Face transformers, with the multipliers they name.

#include "core/model/registry.h"

namespace longstraw::core::model::mamba {

DecoderParts mamba2(const JsonReader& config);
DecoderParts nemotron_h(const JsonReader& config);
DecoderParts bamba(const JsonReader& config);
DecoderParts granitemoehybrid(const JsonReader& config);
DecoderParts falcon_h1(const JsonReader& config);

CheckpointLayout mamba2_layout(const Architecture& architecture);
CheckpointLayout nemotron_h_layout(const Architecture& architecture);

}  // namespace longstraw::core::model::mamba
