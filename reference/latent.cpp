// Latent attention with its keys and values expanded for every head, and sparse selection over the full matrix of scores.
#include "reference/textbook.h"
#include "reference/whole_sequence.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace longstraw::reference {

at::Tensor WholeSequence::latent_attention(const core::model::LatentSpec& spec, const at::Tensor& query_plain_SHn,
                                           const at::Tensor& query_rotary_SHr, const at::Tensor& latent_Sl,
                                           const at::Tensor& rotary_key_Sr, const core::model::Parameter& kv_b) {
  if (spec.sparse && !selected_SS_.defined()) throw std::logic_error("sparse attention before any selection of keys");
  const int64_t tokens = query_plain_SHn.size(0), heads = query_plain_SHn.size(1), plain = query_plain_SHn.size(2);
  // Cut before kv_b: what a token leaves is its latent, and kv_b makes keys and values of it for every later query.
  const at::Tensor expanded_SHe = linear(cut_before(latent_Sl, cut_), kv_b, nullptr).view({tokens, heads, -1});
  const at::Tensor rotary_key_SHr = cut_before(rotary_key_Sr, cut_).unsqueeze(1).expand({-1, heads, -1});

  const at::Tensor query_SHd = at::cat({query_plain_SHn, query_rotary_SHr}, -1);
  const at::Tensor key_SHd = at::cat({expanded_SHe.narrow(-1, 0, plain), rotary_key_SHr}, -1);
  const at::Tensor value_SHv = expanded_SHe.narrow(-1, plain, expanded_SHe.size(-1) - plain);
  return attend(query_SHd.transpose(0, 1), key_SHd.transpose(0, 1), value_SHv.transpose(0, 1),
                spec.sparse ? selected_SS_ : at::Tensor(), spec.scale)
      .transpose(0, 1);
}

void WholeSequence::select_keys(const core::model::IndexerSpec& spec, const at::Tensor& query_Shd, const at::Tensor& key_Sd,
                                const at::Tensor& weight_Sh) {
  const at::NoGradGuard no_graph;
  const at::ScalarType dtype = wide(query_Shd.scalar_type());
  const at::Tensor query_hSd = query_Shd.to(dtype).transpose(0, 1);
  const at::Tensor key_dS = key_Sd.to(dtype).transpose(0, 1);
  const at::Tensor weight_hS1 = weight_Sh.to(dtype).transpose(0, 1).unsqueeze(-1);

  const int64_t tokens = key_Sd.size(0);
  at::Tensor score_SS = at::zeros({tokens, tokens}, query_hSd.options());
  for (int64_t h = 0; h < query_hSd.size(0); ++h) score_SS += weight_hS1[h] * at::relu(at::matmul(query_hSd[h], key_dS));

  const at::Tensor& visible_SS = visible({}, query_hSd);
  const at::Tensor seen_SS = score_SS.masked_fill(at::logical_not(visible_SS), -std::numeric_limits<double>::infinity());
  const at::Tensor best_Sk = largest(seen_SS, std::min(spec.top_k, tokens));
  // A row that sees fewer than k keys has taken invisible ones as well.
  selected_SS_ = at::logical_and(at::zeros_like(visible_SS).scatter(1, best_Sk, true), visible_SS);
}

at::Tensor WholeSequence::selected_keys(int64_t begin, int64_t count) const {
  if (!selected_SS_.defined()) return {};
  const at::Tensor selected_nS = selected_SS_.narrow(0, begin, count);
  const at::Tensor position_S = at::arange(selected_nS.size(1), selected_nS.options().dtype(at::kLong));
  return at::where(selected_nS, position_S, at::scalar_tensor(-1, position_S.options()));
}

}  // namespace longstraw::reference
