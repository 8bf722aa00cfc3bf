#pragma once
// LongStraw's way to carry a decoder's operations out: tokens of one segment (or of several responses replayed
// together) over a prompt state. Weight gradients are added in place to a GradientStore, and each operation keeps no
// more for its backward pass than its formula needs.

#include "longstraw/gradient_store.h"
#include "longstraw/prefix_attention.h"
#include "longstraw/prompt_state.h"

#include "core/model/execution.h"

#include <vector>

namespace longstraw {

// Tokens that a recurrent mixer works on as one matrix product.
inline constexpr int64_t kRecurrentChunk = 64;

class SegmentExecution final : public core::model::Execution {
 public:
  enum class StateUse {
    kWrite,   // capture: what the tokens leave goes into the state
    kVerify,  // recompute: it is there already, and is compared bit for bit
    kLeave,   // replay of responses: nobody comes after these tokens
  };
  struct Options {
    std::vector<Span> spans;  // one, unless the state is left
    Past past;
    StateUse state_use = StateUse::kLeave;
    GradientStore* gradients = nullptr;  // may be null when no backward pass follows
  };
  explicit SegmentExecution(Options options) : options_(std::move(options)) {}

  at::Tensor value(const core::model::Parameter& parameter) override;
  at::Tensor embedding(const at::Tensor& ids_S, const core::model::Parameter& weight_VD) override;
  at::Tensor linear(const at::Tensor& x, const core::model::Parameter& weight_OI, const core::model::Parameter* bias_O) override;
  at::Tensor rms_norm(const at::Tensor& x, const core::model::Parameter& weight, double eps, bool zero_centred) override;
  at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) override;
  at::Tensor rotate(const at::Tensor& x_Shd, const core::model::RotaryTable& table) override;

  at::Tensor attention(const core::model::AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                       const at::Tensor& value_SGd) override;
  void keep_keys_values(const core::model::AttentionSpec& spec, const at::Tensor& key_SGd, const at::Tensor& value_SGd) override;
  at::Tensor latent_attention(const core::model::LatentSpec& spec, const at::Tensor& query_plain_SHn,
                              const at::Tensor& query_rotary_SHr, const at::Tensor& latent_Sl, const at::Tensor& rotary_key_Sr,
                              const core::model::Parameter& kv_b) override;
  void keep_latents(const core::model::LatentSpec& spec, const at::Tensor& latent_Sl, const at::Tensor& rotary_key_Sr) override;
  void select_keys(const core::model::IndexerSpec& spec, const at::Tensor& query_Shd, const at::Tensor& key_Sd,
                   const at::Tensor& weight_Sh) override;
  at::Tensor selected_keys(int64_t begin, int64_t count) const override;
  void keep_index_keys(const core::model::IndexerSpec& spec, const at::Tensor& key_Sd) override;
  at::Tensor causal_convolution(int64_t slot, const at::Tensor& x_SC, const core::model::Parameter& weight_C1K,
                                const core::model::Parameter* bias_C) override;
  at::Tensor gated_delta_rule(int64_t slot, const at::Tensor& query_SGk, const at::Tensor& key_SGk, const at::Tensor& value_SHv,
                              const at::Tensor& log_decay_SH, const at::Tensor& beta_SH) override;
  at::Tensor state_space(int64_t slot, const at::Tensor& x_SHp, const at::Tensor& dt_SH, const at::Tensor& a_H,
                         const at::Tensor& b_SGn, const at::Tensor& c_SGn) override;
  at::Tensor choose_experts(int64_t router, const at::Tensor& scores_SE, int64_t k) override;
  at::Tensor experts(const at::Tensor& x_SD, const at::Tensor& chosen_Sk, const at::Tensor& weights_Sk,
                     const core::model::ExpertWeights& experts) override;

  // What the tokens themselves leave, still in its graph: where the state's adjoint enters. Rows are [S, heads, width].
  struct OwnState {
    bool carried = false;
    int64_t slot = 0, part = 0;
    at::Tensor value;
  };
  const std::vector<OwnState>& own_state() const { return own_state_; }
  // Parts of the state whose recomputed values were not the captured bits.
  int64_t mismatches() const { return mismatches_; }
  // Routers and indexers that would have chosen otherwise at recompute than at capture. Experts are those of the capture
  // all the same; a selection of keys is not stored, so a differing one is used as it is.
  int64_t changed_choices() const { return changed_choices_; }

 private:
  void keep_rows(int64_t slot, int64_t part, const at::Tensor& rows_Shw);
  void keep_carried(int64_t slot, int64_t part, const at::Tensor& value);
  at::Tensor attend_selected(const core::model::LatentSpec& spec, const at::Tensor& query_SHw, const at::Tensor& row_Sw,
                             int64_t latent) const;
  // Of a recurrent operation's outputs: keeps the end value, if there is one, and returns the rows.
  at::Tensor keep_end(int64_t slot, int64_t part, std::vector<at::Tensor> outputs);

  Options options_;
  at::Tensor selection_;  // of the latest select_keys
  std::vector<OwnState> own_state_;
  int64_t mismatches_ = 0;
  int64_t changed_choices_ = 0;
};

}  // namespace longstraw
