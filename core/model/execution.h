#pragma once
// How a decoder's operations are carried out. A decoder (decoder.h) says *what* a model computes and calls these
// operations by name; each trainer says *how*. The pointwise defaults here are the textbook formulas with plain
// autograd. Token mixing has no default: the reference and LongStraw each bring their own, so that a fault in one is
// visible to a comparison with the other.
//
// Shape suffixes: S tokens run together (packed, no batch dimension), D hidden size, I in features, O out features,
// V vocabulary, H query heads, G key/value heads, d head size.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace longstraw::core::model {

// A weight of the checkpoint under the name and shape it has there. `value` is a leaf that requires gradients.
struct Parameter {
  std::string name;
  at::Tensor value;
};

// cos and sin of the rotary angles of S tokens, already times the attention factor, in the dtype of the computation.
struct RotaryTable {
  at::Tensor cos_Sr;  // r = rotary dimensions of a head; both halves hold the same angles (NeoX layout)
  at::Tensor sin_Sr;
};

struct AttentionSpec {
  int64_t layer = 0;
  double scale = 1.0;             // of the scores, head_dim^-0.5 unless the family says otherwise
  std::optional<int64_t> window;  // key j is visible to query i iff i - window < j <= i; none: all j <= i
};

class Execution {
 public:
  virtual ~Execution() = default;

  // Rows of weight_VD; ids int64 [S] -> [S, D].
  virtual at::Tensor embedding(const at::Tensor& ids_S, const Parameter& weight_VD);
  // x Wᵀ (+ b); x [..., I], W [O, I], b [O] or null -> [..., O].
  virtual at::Tensor linear(const at::Tensor& x, const Parameter& weight_OI, const Parameter* bias_O);
  // w · cast(x32 · rsqrt(mean(x32²) + eps)) over the last dimension; x32 is x in float32 (float64 for float64 input).
  virtual at::Tensor rms_norm(const at::Tensor& x, const Parameter& weight, double eps);
  // silu(gate) · up.
  virtual at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
  // x cos + rotate_half(x) sin on the first r dimensions of each head, the rest passes; x [S, heads, d].
  virtual at::Tensor rotate(const at::Tensor& x_Shd, const RotaryTable& table);
  // hidden + update: the residual connection.
  virtual at::Tensor add(const at::Tensor& hidden, const at::Tensor& update);

  // Softmax attention of each token over the tokens before it and itself (what "before" means is the trainer's).
  // Query head h reads key/value head h / (H / G). Returns [S, H, d].
  virtual at::Tensor attention(const AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                               const at::Tensor& value_SGd) = 0;
  // Keys and values that later tokens need, when nobody needs these tokens' own attention output (the last layer of
  // a node without a loss). `attention` is not called for that layer then.
  virtual void keep_keys_values(const AttentionSpec& spec, const at::Tensor& key_SGd, const at::Tensor& value_SGd) = 0;
};

}  // namespace longstraw::core::model
