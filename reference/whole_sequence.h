#pragma once
// The reference's way to carry out a decoder's operations: one whole sequence, explicit boolean masks, textbook softmax
//
//   attention(q, k, v)_i = Σ_j softmax_j(scale · q_i · k_j) v_j     over the visible j
//
// in the run's own dtype, the softmax itself in float32 for bfloat16 (and cast back, as Hugging Face does). Or, where
// the S × S scores are too large, LibTorch's scaled_dot_product_attention.
//
// S tokens, H query heads, G key/value heads, d head size.

#include "core/model/execution.h"
#include "reference/config.h"

#include <map>
#include <optional>

namespace longstraw::reference {

class WholeSequence final : public core::model::Execution {
 public:
  // Keys and values of tokens 0 … cut - 1 are constants for every query; 0 cuts nothing.
  WholeSequence(Attention attention, int64_t cut) : attention_(attention), cut_(cut) {}

  at::Tensor attention(const core::model::AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                       const at::Tensor& value_SGd) override;
  // The reference keeps no state between runs: never called.
  void keep_keys_values(const core::model::AttentionSpec& spec, const at::Tensor& key_SGd, const at::Tensor& value_SGd) override;

 private:
  const at::Tensor& visible(std::optional<int64_t> window, const at::Tensor& query_SHd);
  Attention attention_;
  int64_t cut_;
  std::map<std::optional<int64_t>, at::Tensor> visible_SS_;  // by window; [query, key]
};

}  // namespace longstraw::reference
