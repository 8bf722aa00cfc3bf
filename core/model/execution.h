#pragma once
// How a decoder's operations are carried out. A decoder (decoder.h) says *what* a model computes and calls these
// operations by name; each trainer says *how*. The pointwise defaults here are the textbook formulas with plain
// autograd. Token mixing has no default: the reference and LongStraw each bring their own, so that a fault in one is
// visible to a comparison with the other.
//
// A mixer's operation names the slot of its state (state.h). Besides the output it makes the state that later tokens
// need. Where nobody needs the tokens' own output (the last mixer of a node without a loss), only keep_… is called, or a
// recurrent operation whose output nobody uses.
//
// Shape suffixes: S tokens run together (packed, no batch dimension), D hidden size, I in features, O out features,
// V vocabulary, H query or value heads, G key/value heads or groups, d head size, E experts, k chosen experts.
// "Wide" is float32, float64 in a float64 run.

#include "core/model/safetensors.h"
#include "core/model/shapes.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::model {

// A weight of the checkpoint under the name and shape it has there. `value` is a leaf that requires gradients, unless
// `trained` is false: a constant such as a router's balancing bias, kept wide. Undefined until the checkpoint is read.
struct Parameter {
  std::string name;
  Shape shape;
  bool trained = true;
  at::Tensor value = {};
};

// cos and sin of the rotary angles of S tokens, already times the attention factor, in the dtype of the computation.
struct RotaryTable {
  at::Tensor cos_Sr;  // r = rotary dimensions of a head; both halves hold the same angles (NeoX layout)
  at::Tensor sin_Sr;
};

struct AttentionSpec {
  int64_t slot = 0;
  double scale = 1.0;             // of the scores, head_dim^-0.5 unless the family says otherwise
  std::optional<int64_t> window;  // key j is visible to query i iff i - window < j <= i; none: all j <= i
};

struct LatentSpec {
  int64_t slot = 0;
  double scale = 1.0;
  bool sparse = false;  // keys are those of the latest select_keys
};

struct IndexerSpec {
  int64_t slot = 0;
  int64_t top_k = 0;
};

// One projection of one expert: a parameter of its own, or rows of a slice of a fused one ([E, rows, in]).
struct ExpertWeight {
  const Parameter* parameter = nullptr;
  std::optional<int64_t> expert = {};  // index into the first dimension of a fused parameter
  int64_t row = 0;                     // first row
  int64_t rows = -1;                   // -1: all
  // The same part of a tensor of the parameter's shape (its value, its gradient): a view [O, I].
  at::Tensor of(const at::Tensor& whole) const;
};

struct ExpertWeights {
  std::vector<ExpertWeight> gate;  // empty: not gated
  std::vector<ExpertWeight> up;
  std::vector<ExpertWeight> down;
  Activation activation = Activation::kSilu;
};

class Execution {
 public:
  virtual ~Execution() = default;

  // The parameter as a value for plain autograd; its gradient goes where this execution gathers gradients.
  virtual at::Tensor value(const Parameter& parameter);
  // Rows of weight_VD; ids int64 [S] -> [S, D].
  virtual at::Tensor embedding(const at::Tensor& ids_S, const Parameter& weight_VD);
  // x Wᵀ (+ b); x [..., I], W [O, I], b [O] or null -> [..., O].
  virtual at::Tensor linear(const at::Tensor& x, const Parameter& weight_OI, const Parameter* bias_O);
  // w · cast(x32 · rsqrt(mean(x32²) + eps)) over the last dimension; x32 is x in wide. Zero-centred:
  // cast(x32 · rsqrt(…) · (1 + w32)).
  virtual at::Tensor rms_norm(const at::Tensor& x, const Parameter& weight, double eps, bool zero_centred = false);
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
  virtual void keep_keys_values(const AttentionSpec& spec, const at::Tensor& key_SGd, const at::Tensor& value_SGd) = 0;

  // Multi-head latent attention: keys and values of head h are [W_K c | r] and W_V c of each token's latent c and rotated
  // key r; rows of kv_b by head: [W_K | W_V]. query [S, H, plain], [S, H, rotary], latent [S, l], rotary key [S, rotary],
  // kv_b [H · (plain + value), l] -> [S, H, value]. The state is [c | r].
  virtual at::Tensor latent_attention(const LatentSpec& spec, const at::Tensor& query_plain_SHn, const at::Tensor& query_rotary_SHr,
                                      const at::Tensor& latent_Sl, const at::Tensor& rotary_key_Sr, const Parameter& kv_b) = 0;
  virtual void keep_latents(const LatentSpec& spec, const at::Tensor& latent_Sl, const at::Tensor& rotary_key_Sr) = 0;

  // Chooses for each token the top_k tokens s among those before it and itself with the largest
  //   Σ_h weight_h · relu(query_h · key_s),
  // all of them when there are fewer; of equal scores the earlier token. Computed wide, without gradients. The choice holds
  // until the next call. query [S, h, d], key [S, d], weight [S, h] (already times every scale, wide).
  virtual void select_keys(const IndexerSpec& spec, const at::Tensor& query_Shd, const at::Tensor& key_Sd,
                           const at::Tensor& weight_Sh) = 0;
  // The choice of the latest select_keys for `count` tokens from row `begin` of those run together: int64 [count, K], positions in
  // the token's own sequence, -1 where it sees fewer; undefined before the first. For those who look on.
  virtual at::Tensor selected_keys(int64_t begin, int64_t count) const;
  virtual void keep_index_keys(const IndexerSpec& spec, const at::Tensor& key_Sd) = 0;

  // silu(Σ_j w[c, j] · x[t - K + 1 + j, c] (+ b[c])), zeros before the sequence; x [S, C], w [C, 1, K] -> [S, C].
  // State: the slot's carried value 0, the last K - 1 rows of x as [C, K - 1].
  virtual at::Tensor causal_convolution(int64_t slot, const at::Tensor& x_SC, const Parameter& weight_C1K,
                                        const Parameter* bias_C) = 0;
  // Gated delta rule, S_t [k, v] wide, q and k normalised to length 1 (x · rsqrt(Σx² + 1e-6)), q times k^-0.5:
  //   S ← e^{g_t} S;  S ← S + k_t ⊗ β_t (v_t − Sᵀ k_t);  o_t = Sᵀ q_t
  // query, key [S, G, k] (value head h reads key head h / (H / G)), value [S, H, v], log decay g and β [S, H], wide
  // -> [S, H, v]. State: the slot's carried value 1, [H, k, v].
  virtual at::Tensor gated_delta_rule(int64_t slot, const at::Tensor& query_SGk, const at::Tensor& key_SGk,
                                      const at::Tensor& value_SHv, const at::Tensor& log_decay_SH, const at::Tensor& beta_SH) = 0;
  // Mamba-2: h_t = e^{dt_t a} h_{t-1} + dt_t x_t ⊗ b_t;  y_t = h_t c_t. x [S, H, p], dt [S, H] and a [H] wide (a < 0),
  // b, c [S, G, n] (head h reads group h / (H / G)) -> [S, H, p]. State: the slot's carried value 1, [H, p, n] wide.
  virtual at::Tensor state_space(int64_t slot, const at::Tensor& x_SHp, const at::Tensor& dt_SH, const at::Tensor& a_H,
                                 const at::Tensor& b_SGn, const at::Tensor& c_SGn) = 0;

  // The k experts of each token with the largest scores, of equal ones the lower index; a router is known by its number
  // among the decoder's. scores [S, E] without gradients (-inf: never) -> int64 [S, k] in falling order of score.
  virtual at::Tensor choose_experts(int64_t router, const at::Tensor& scores_SE, int64_t k) = 0;
  // Σ_j weights[t, j] · expert_{chosen[t, j]}(x_t), expert(x) = down(act(gate x) · up x) or down(act(up x)).
  // x [S, D], chosen int64 [S, k], weights [S, k] -> [S, D].
  virtual at::Tensor experts(const at::Tensor& x_SD, const at::Tensor& chosen_Sk, const at::Tensor& weights_Sk,
                             const ExpertWeights& experts) = 0;
};

}  // namespace longstraw::core::model
