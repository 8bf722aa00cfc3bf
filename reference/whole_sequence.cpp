#include "reference/whole_sequence.h"

#include <ATen/ATen.h>

#include <limits>
#include <stdexcept>

namespace longstraw::reference {

namespace {

at::Tensor cut_before(const at::Tensor& state_SGd, int64_t cut) {
  if (cut <= 0) return state_SGd;
  const int64_t kept = state_SGd.size(0) - cut;
  return at::cat({state_SGd.narrow(0, 0, cut).detach(), state_SGd.narrow(0, cut, kept)}, 0);
}

// Query head h reads key/value head h / (H / G).
at::Tensor for_each_query_head(const at::Tensor& state_SGd, int64_t heads) {
  const int64_t repeats = heads / state_SGd.size(1);
  return at::repeat_interleave(state_SGd, repeats, 1).transpose(0, 1);
}

at::Tensor textbook(const at::Tensor& query_HSd, const at::Tensor& key_HSd, const at::Tensor& value_HSd,
                    const at::Tensor& visible_SS, double scale) {
  const at::ScalarType dtype = query_HSd.scalar_type();
  const at::Tensor scores_HSS = at::matmul(query_HSd, key_HSd.transpose(1, 2)) * scale;
  const at::Tensor masked_HSS = scores_HSS.masked_fill(at::logical_not(visible_SS), -std::numeric_limits<double>::infinity());
  const at::Tensor weights_HSS = at::softmax(masked_HSS, -1, dtype == at::kDouble ? at::kDouble : at::kFloat).to(dtype);
  return at::matmul(weights_HSS, value_HSd);
}

}  // namespace

at::Tensor WholeSequence::attention(const core::model::AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                                    const at::Tensor& value_SGd) {
  const int64_t heads = query_SHd.size(1);
  const at::Tensor query_HSd = query_SHd.transpose(0, 1);
  const at::Tensor key_HSd = for_each_query_head(cut_before(key_SGd, cut_), heads);
  const at::Tensor value_HSd = for_each_query_head(cut_before(value_SGd, cut_), heads);

  if (attention_ == Attention::kTextbook) {
    return textbook(query_HSd, key_HSd, value_HSd, visible(spec.window, query_SHd), spec.scale).transpose(0, 1);
  }
  // A mask would make it materialise S × S numbers: without a window the causal rule is asked for by name.
  const std::optional<at::Tensor> mask = spec.window ? std::optional(visible(spec.window, query_SHd)) : std::nullopt;
  const at::Tensor mixed_1HSd =
      at::scaled_dot_product_attention(query_HSd.unsqueeze(0), key_HSd.unsqueeze(0), value_HSd.unsqueeze(0), mask,
                                       /*dropout_p=*/0.0, /*is_causal=*/!mask.has_value(), spec.scale);
  return mixed_1HSd.squeeze(0).transpose(0, 1);
}

void WholeSequence::keep_keys_values(const core::model::AttentionSpec&, const at::Tensor&, const at::Tensor&) {
  throw std::logic_error("the reference runs whole sequences and keeps no state");
}

const at::Tensor& WholeSequence::visible(std::optional<int64_t> window, const at::Tensor& query_SHd) {
  at::Tensor& mask_SS = visible_SS_[window];
  if (!mask_SS.defined()) {
    const at::Tensor position = at::arange(query_SHd.size(0), query_SHd.options().dtype(at::kLong));
    const at::Tensor query_S1 = position.unsqueeze(1), key_1S = position.unsqueeze(0);
    mask_SS = key_1S <= query_S1;
    if (window) mask_SS = at::logical_and(mask_SS, key_1S > query_S1 - *window);
  }
  return mask_SS;
}

}  // namespace longstraw::reference
