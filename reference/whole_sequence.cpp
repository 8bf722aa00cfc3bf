#include "reference/whole_sequence.h"

#include "reference/textbook.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <stdexcept>

namespace longstraw::reference {

using core::model::AttentionSpec;
using core::model::IndexerSpec;
using core::model::LatentSpec;

namespace {
[[noreturn]] void keeps_no_state() { throw std::logic_error("the reference runs whole sequences and keeps no state"); }
}  // namespace

at::Tensor WholeSequence::attention(const AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                                    const at::Tensor& value_SGd) {
  const int64_t heads = query_SHd.size(1);
  const at::Tensor query_HSd = query_SHd.transpose(0, 1);
  const at::Tensor key_HSd = for_each_head(cut_before(key_SGd, cut_), heads).transpose(0, 1);
  const at::Tensor value_HSd = for_each_head(cut_before(value_SGd, cut_), heads).transpose(0, 1);
  const at::Tensor mask_SS = spec.window ? visible(spec.window, query_HSd) : at::Tensor();
  return attend(query_HSd, key_HSd, value_HSd, mask_SS, spec.scale).transpose(0, 1);
}

at::Tensor WholeSequence::attend(const at::Tensor& query_HSd, const at::Tensor& key_HSd, const at::Tensor& value_HSv,
                                 const at::Tensor& mask_SS, double scale) {
  if (attention_ == Attention::kTextbook) {
    const at::Tensor& visible_SS = mask_SS.defined() ? mask_SS : visible({}, query_HSd);
    return softmax_attention(query_HSd, key_HSd, value_HSv, visible_SS, scale);
  }
  // Only for equal sizes of keys and values does it do without the S × S scores: the smaller ones are filled with zeros.
  const int64_t key_size = key_HSd.size(-1), value_size = value_HSv.size(-1);
  const auto filled = [&](const at::Tensor& x_HS, int64_t other) {
    const int64_t missing = std::max<int64_t>(0, other - x_HS.size(-1));
    return (missing > 0 ? at::constant_pad_nd(x_HS, {0, missing}) : x_HS).unsqueeze(0);
  };
  // A mask would make it materialise S × S numbers: without one the causal rule is asked for by name.
  const std::optional<at::Tensor> mask = mask_SS.defined() ? std::optional(mask_SS) : std::nullopt;
  const at::Tensor mixed_1HS = at::scaled_dot_product_attention(filled(query_HSd, value_size), filled(key_HSd, value_size),
                                                                filled(value_HSv, key_size), mask,
                                                                /*dropout_p=*/0.0, /*is_causal=*/!mask.has_value(), scale);
  return mixed_1HS.squeeze(0).narrow(-1, 0, value_size);
}

const at::Tensor& WholeSequence::visible(std::optional<int64_t> window, const at::Tensor& query_HSd) {
  at::Tensor& mask_SS = visible_SS_[window];
  if (!mask_SS.defined()) {
    const at::Tensor position = at::arange(query_HSd.size(1), query_HSd.options().dtype(at::kLong).requires_grad(false));
    const at::Tensor query_S1 = position.unsqueeze(1), key_1S = position.unsqueeze(0);
    mask_SS = key_1S <= query_S1;
    if (window) mask_SS = at::logical_and(mask_SS, key_1S > query_S1 - *window);
  }
  return mask_SS;
}

void WholeSequence::keep_keys_values(const AttentionSpec&, const at::Tensor&, const at::Tensor&) { keeps_no_state(); }
void WholeSequence::keep_latents(const LatentSpec&, const at::Tensor&, const at::Tensor&) { keeps_no_state(); }
void WholeSequence::keep_index_keys(const IndexerSpec&, const at::Tensor&) { keeps_no_state(); }

}  // namespace longstraw::reference
