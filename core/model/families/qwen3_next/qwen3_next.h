#pragma once
// Hybrids of gated attention and the gated delta rule: Qwen3-Next (qwen3_next), Qwen3.5 and Qwen3.6 (qwen3_5, qwen3_5_moe and
// the names of their text parts). Every full_attention_interval-th layer is attention with an output gate and a partly rotated
// head, the others are delta rules; norms are zero-centred. The MLP is dense (qwen3_5), a mixture of experts with a gated
// shared one (qwen3_5_moe), or either by layer (qwen3_next).

#include "core/model/registry.h"

namespace longstraw::core::model::qwen3_next {

DecoderParts qwen3_next(const JsonReader& config);
// Configurations of a text model alone, and those of a multimodal model, which hold it as text_config.
DecoderParts qwen3_5_text(const JsonReader& config);
DecoderParts qwen3_5(const JsonReader& config);
DecoderParts qwen3_5_moe_text(const JsonReader& config);
DecoderParts qwen3_5_moe(const JsonReader& config);

// Weights of a multimodal model's vision tower and of multi-token prediction are skipped.
CheckpointLayout layout(const Architecture& architecture);

}  // namespace longstraw::core::model::qwen3_next
