// Latent attention and sparse selection of a segment (segment_execution.h).
#include "longstraw/autograd_node.h"
#include "longstraw/segment_execution.h"
#include "longstraw/sparse_attention.h"
#include "longstraw/sparse_selection.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace longstraw {

using core::model::IndexerSpec;
using core::model::LatentSpec;
using core::model::Parameter;

// Absorbed: q · (W_K c) = (W_Kᵀ q) · c, so that queries of all heads look at one row [c | r] a token, and W_V is applied to
// the mixed latents. Nothing is ever expanded over the prefix.
at::Tensor SegmentExecution::latent_attention(const LatentSpec& spec, const at::Tensor& query_plain_SHn,
                                              const at::Tensor& query_rotary_SHr, const at::Tensor& latent_Sl,
                                              const at::Tensor& rotary_key_Sr, const Parameter& kv_b) {
  const int64_t heads = query_plain_SHn.size(1), plain = query_plain_SHn.size(2), latent = latent_Sl.size(1);
  const at::Tensor kv_b_Hol = value(kv_b).view({heads, -1, latent});
  const at::Tensor key_Hnl = kv_b_Hol.narrow(1, 0, plain);
  const at::Tensor value_Hvl = kv_b_Hol.narrow(1, plain, kv_b_Hol.size(1) - plain);

  const at::Tensor absorbed_SHl = at::bmm(query_plain_SHn.transpose(0, 1), key_Hnl).transpose(0, 1);
  const at::Tensor query_SHw = at::cat({absorbed_SHl, query_rotary_SHr}, -1);
  const at::Tensor row_S1w = at::cat({latent_Sl, rotary_key_Sr}, -1).unsqueeze(1);
  keep_rows(spec.slot, 0, row_S1w);
  at::Tensor mixed_SHl;
  if (spec.sparse) {
    mixed_SHl = attend_selected(spec, query_SHw, row_S1w.squeeze(1), latent);
  } else {
    mixed_SHl = prefix_attention({.slot = spec.slot, .scale = spec.scale, .window = {}}, query_SHw, row_S1w,
                                 row_S1w.narrow(-1, 0, latent), options_.spans, options_.past);
  }
  return at::bmm(mixed_SHl.transpose(0, 1), value_Hvl.transpose(1, 2)).transpose(0, 1);
}

at::Tensor SegmentExecution::attend_selected(const LatentSpec& spec, const at::Tensor& query_SHw, const at::Tensor& row_Sw,
                                             int64_t latent) const {
  const Past past = options_.past;
  const SparseInput input{.query_SHd = query_SHw.detach(),
                          .own_key_Sd = row_Sw.detach(),
                          .past_key_Nd = past.state->rows(spec.slot, 0, 0, past.tokens).squeeze(0),
                          .positions_SK = selection_,
                          .spans = options_.spans,
                          .value_width = latent,
                          .scale = spec.scale};
  const SparseAttention saved = sparse_attend(input);
  const int64_t slot = spec.slot;
  return differentiable(saved.out_SHv, {query_SHw, row_Sw}, [=](const at::Tensor& grad) -> std::vector<at::Tensor> {
    PastAdjoint adjoint;
    if (past.carries_gradient()) {
      const int64_t from = std::max(past.adjoint_from, past.state->adjoint_begin());
      adjoint = {past.state->rows_adjoint(slot, 0, from, past.tokens - from).squeeze(0), from};
    }
    const SparseAttention merged{saved.out_SHv.detach(), saved.lse_SH};
    const SparseGradients made = sparse_attend_backward(input, merged, grad, adjoint);
    return {made.query_SHd, made.own_key_Sd.to(input.own_key_Sd.scalar_type())};
  });
}

void SegmentExecution::keep_latents(const LatentSpec& spec, const at::Tensor& latent_Sl, const at::Tensor& rotary_key_Sr) {
  keep_rows(spec.slot, 0, at::cat({latent_Sl, rotary_key_Sr}, -1).unsqueeze(1));
}

void SegmentExecution::select_keys(const IndexerSpec& spec, const at::Tensor& query_Shd, const at::Tensor& key_Sd,
                                   const at::Tensor& weight_Sh) {
  const at::NoGradGuard no_grad;
  keep_index_keys(spec, key_Sd);
  PromptState* state = options_.past.state;
  const at::Tensor past_Nd = state->rows(spec.slot, 0, 0, options_.past.tokens).squeeze(0);
  selection_ = select_top_keys({.query_Shd = query_Shd.detach(),
                                .own_key_Sd = key_Sd.detach(),
                                .past_key_Nd = past_Nd,
                                .weight_Sh = weight_Sh.detach(),
                                .spans = options_.spans,
                                .top_k = spec.top_k});
  if (options_.state_use == StateUse::kLeave) return;
  const uint64_t hash = selection_hash(selection_);
  if (options_.state_use == StateUse::kWrite) state->write_selection_hash(spec.slot, options_.past.tokens, hash);
  else if (state->selection_hash(spec.slot, options_.past.tokens).value_or(hash) != hash) ++changed_choices_;
}

at::Tensor SegmentExecution::selected_keys(int64_t begin, int64_t count) const {
  return selection_.defined() ? selection_.narrow(0, begin, count).to(at::kLong) : at::Tensor();
}

void SegmentExecution::keep_index_keys(const IndexerSpec& spec, const at::Tensor& key_Sd) {
  keep_rows(spec.slot, 0, key_Sd.detach().unsqueeze(1));
}

}  // namespace longstraw
