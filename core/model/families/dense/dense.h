#pragma once
// Dense decoders: llama (with SmolLM2), mistral, qwen2, qwen3. Pre-norm residual blocks,
//   x += Wo · attention(rotate(norm(Wq h)), rotate(norm(Wk h)), Wv h),   h = rms_norm(x)
//   x += Wdown · (silu(Wgate h) ⊙ Wup h),                                h = rms_norm(x)
// Biases, the norm of query and key heads (qwen3) and the windows are what Architecture says. Prompt state of a layer:
// keys after norm and rotation, and values.

#include "core/model/registry.h"

namespace longstraw::core::model::dense {

Architecture read_llama(const JsonReader& config);
Architecture read_mistral(const JsonReader& config);
Architecture read_qwen2(const JsonReader& config);
Architecture read_qwen3(const JsonReader& config);

std::vector<ParameterShape> parameter_shapes(const Architecture& architecture);
std::vector<LayerState> layer_states(const Architecture& architecture);
std::unique_ptr<Decoder> build(DecoderParts parts);

}  // namespace longstraw::core::model::dense
