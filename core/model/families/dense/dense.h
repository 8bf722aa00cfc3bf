#pragma once
// Dense decoders: llama (with SmolLM2), mistral, qwen2, qwen3, smollm3. Pre-norm residual blocks,
//   x += Wo · attention(rotate(norm(Wq h)), rotate(norm(Wk h)), Wv h),   h = rms_norm(x)
//   x += Wdown · (silu(Wgate h) ⊙ Wup h),                                h = rms_norm(x)
// Biases, the norm of query and key heads (qwen3), layers without rotation (smollm3) and the windows are what Architecture says.
// Prompt state of a layer: keys after norm and rotation, and values.

#include "core/model/registry.h"

namespace longstraw::core::model::dense {

DecoderParts llama(const JsonReader& config);
DecoderParts mistral(const JsonReader& config);
DecoderParts qwen2(const JsonReader& config);
DecoderParts qwen3(const JsonReader& config);
DecoderParts smollm3(const JsonReader& config);

}  // namespace longstraw::core::model::dense
