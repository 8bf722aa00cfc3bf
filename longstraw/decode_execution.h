#pragma once
// One new token of each of B responses at a time: over the shared prompt state and over what the response's own earlier
// tokens left. The prompt state is read, never written; without gradients.

#include "longstraw/attention_block.h"
#include "longstraw/prompt_state.h"

#include "core/model/execution.h"

#include <cstdint>
#include <vector>

namespace longstraw {

class DecodeExecution final : public core::model::Execution {
 public:
  // Responses of up to `capacity` tokens after positions 0 … past_tokens-1 of `past`.
  DecodeExecution(const core::model::Decoder& decoder, const PromptState& past, int64_t past_tokens, int64_t members,
                  int64_t capacity);
  // Call it after each token.
  void next_token() { ++tokens_; }

  at::Tensor attention(const core::model::AttentionSpec& spec, const at::Tensor& query_BHd, const at::Tensor& key_BGd,
                       const at::Tensor& value_BGd) override;
  void keep_keys_values(const core::model::AttentionSpec& spec, const at::Tensor& key_BGd, const at::Tensor& value_BGd) override;
  at::Tensor latent_attention(const core::model::LatentSpec& spec, const at::Tensor& query_plain_BHn,
                              const at::Tensor& query_rotary_BHr, const at::Tensor& latent_Bl, const at::Tensor& rotary_key_Br,
                              const core::model::Parameter& kv_b) override;
  void keep_latents(const core::model::LatentSpec& spec, const at::Tensor& latent_Bl, const at::Tensor& rotary_key_Br) override;
  void select_keys(const core::model::IndexerSpec& spec, const at::Tensor& query_Bhd, const at::Tensor& key_Bd,
                   const at::Tensor& weight_Bh) override;
  void keep_index_keys(const core::model::IndexerSpec& spec, const at::Tensor& key_Bd) override;
  at::Tensor causal_convolution(int64_t slot, const at::Tensor& x_BC, const core::model::Parameter& weight_C1K,
                                const core::model::Parameter* bias_C) override;
  at::Tensor gated_delta_rule(int64_t slot, const at::Tensor& query_BGk, const at::Tensor& key_BGk, const at::Tensor& value_BHv,
                              const at::Tensor& log_decay_BH, const at::Tensor& beta_BH) override;
  at::Tensor state_space(int64_t slot, const at::Tensor& x_BHp, const at::Tensor& dt_BH, const at::Tensor& a_H,
                         const at::Tensor& b_BGn, const at::Tensor& c_BGn) override;
  at::Tensor choose_experts(int64_t router, const at::Tensor& scores_BE, int64_t k) override;
  at::Tensor experts(const at::Tensor& x_BD, const at::Tensor& chosen_Bk, const at::Tensor& weights_Bk,
                     const core::model::ExpertWeights& experts) override;

 private:
  struct Slot {
    std::vector<at::Tensor> rows;     // [B, heads, capacity, width]
    std::vector<at::Tensor> carried;  // [1 or B, ...]; undefined: zeros
  };
  void keep_row(int64_t slot, int64_t part, const at::Tensor& row_Bhw);
  at::Tensor own_rows(int64_t slot, int64_t part, int64_t first, int64_t count) const;
  at::Tensor attend_rows(int64_t slot, double scale, const std::optional<int64_t>& window, const at::Tensor& query_BHd,
                         const std::optional<int64_t>& value_width) const;
  at::Tensor attend_selected(int64_t slot, double scale, const at::Tensor& query_BHw, int64_t value_width) const;

  const PromptState& past_;
  int64_t past_tokens_;
  int64_t tokens_ = 0;  // own tokens of each member before this one
  std::vector<Slot> slots_;
  at::Tensor selection_BK_;  // positions in the whole sequence, rising
};

}  // namespace longstraw
