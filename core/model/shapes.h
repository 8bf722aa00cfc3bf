#pragma once
// The sizes of a decoder's building blocks (blocks/): what a block is made from, what `inspect` prints and what memory is
// planned by.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace longstraw::core::model {

enum class Activation { kSilu, kRelu2 };

// Softmax attention with grouped heads.
struct AttentionShape {
  int64_t heads = 0;     // H, of queries
  int64_t kv_heads = 0;  // G, divides H
  int64_t head_dim = 0;  // d
  double scale = 0.0;    // of the scores
  std::optional<int64_t> window = {};
  bool query_key_value_bias = false;
  bool output_bias = false;
  bool query_key_norm = false;     // RMSNorm of each query and key head before the rotation
  bool zero_centred_norm = false;  // of that norm: times 1 + w
  bool rotary = true;              // false: no position embedding
  bool output_gate = false;        // the query projection also makes a gate: out = o_proj(attention * sigmoid(gate))
  double input_multiplier = 1.0;   // of the block's input, of the keys before their rotation, of the block's output
  double key_multiplier = 1.0;
  double output_multiplier = 1.0;
};

// Which keys a query may attend to, by scores of a small indexer (DeepSeek sparse attention).
struct IndexerShape {
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t top_k = 0;
  bool interleaved_rotary = false;
  bool own = true;  // false: the layer takes the selection of the layer before it
};

// Multi-head latent attention.
struct LatentAttentionShape {
  int64_t heads = 0;
  std::optional<int64_t> query_rank = {};  // none: one query projection
  int64_t latent = 0;                      // kv_lora_rank
  int64_t rotary_dim = 0;                  // of query and key heads, shared by all key heads
  int64_t plain_dim = 0;                   // of query and key heads, without rotation
  int64_t value_dim = 0;
  double scale = 0.0;
  bool interleaved_rotary = true;
  bool bias = false;  // of q_a, kv_a and o projections
  std::optional<IndexerShape> indexer = {};
};

// Gated delta rule with its causal convolution.
struct DeltaRuleShape {
  int64_t key_heads = 0;
  int64_t value_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t kernel = 4;
  bool fused_projections = false;  // in_proj_qkvz and in_proj_ba, rows grouped by key head
};

// Mamba-2 with its causal convolution.
struct StateSpaceShape {
  int64_t heads = 0;     // H
  int64_t head_dim = 0;  // P
  int64_t groups = 0;    // G, divides H
  int64_t state = 0;     // N
  int64_t kernel = 4;
  bool convolution_bias = true;
  bool input_bias = false;  // of in_proj
  bool output_bias = false;
  double time_step_min = 0.0;                                      // dt is clamped to this range
  double time_step_max = 0.0;                                      // infinity: no clamp
  enum class Norm { kWhole, kGroups, kNone } norm = Norm::kWhole;  // over all heads, by group, only the gate
  bool norm_before_gate = false;
  double input_multiplier = 1.0;
  std::array<double, 5> projection_multipliers{1, 1, 1, 1, 1};  // of z, x, B, C and dt
  double output_multiplier = 1.0;
};

struct MlpShape {
  int64_t width = 0;
  Activation activation = Activation::kSilu;
  bool gated = true;
  bool bias = false;
  bool fused = false;  // gate and up in one matrix, the gate's rows first: input_linear and output_linear
  double gate_multiplier = 1.0;
  double output_multiplier = 1.0;
};

// Router, routed experts and those that every token passes.
struct ExpertsShape {
  int64_t experts = 0;
  int64_t chosen = 0;        // per token
  int64_t width = 0;         // of one routed expert
  int64_t shared_width = 0;  // 0: none
  int64_t latent = 0;        // width of the experts' input when it is projected down before them; 0: it is not
  Activation activation = Activation::kSilu;
  bool gated = true;
};

using BlockShape = std::variant<AttentionShape, LatentAttentionShape, DeltaRuleShape, StateSpaceShape, MlpShape, ExpertsShape>;

}  // namespace longstraw::core::model
