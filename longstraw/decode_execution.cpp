#include "longstraw/decode_execution.h"

#include "longstraw/causal_convolution.h"
#include "longstraw/delta_rule.h"
#include "longstraw/grouped_experts.h"
#include "longstraw/sparse_selection.h"
#include "longstraw/state_space.h"

#include "core/device/device.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace longstraw {

using core::model::AttentionSpec;
using core::model::IndexerSpec;
using core::model::LatentSpec;
using core::model::Parameter;

DecodeExecution::DecodeExecution(const core::model::Decoder& decoder, const PromptState& past, int64_t past_tokens, int64_t members,
                                 int64_t capacity)
    : past_(past), past_tokens_(past_tokens) {
  const auto options = at::TensorOptions().dtype(decoder.dtype()).device(decoder.device());
  const auto& states = decoder.states();
  for (size_t s = 0; s < states.size(); ++s) {
    Slot& slot = slots_.emplace_back();
    for (const auto& rows : states[s].rows) slot.rows.push_back(at::empty({members, rows.heads, capacity, rows.width}, options));
    for (size_t part = 0; part < states[s].carried.size(); ++part) {
      const at::Tensor border = past.carried(static_cast<int64_t>(s), static_cast<int64_t>(part), past_tokens);
      slot.carried.push_back(border.defined() ? border.unsqueeze(0) : border);
    }
  }
}

void DecodeExecution::keep_row(int64_t slot, int64_t part, const at::Tensor& row_Bhw) {
  slots_[slot].rows[part].select(2, tokens_).copy_(row_Bhw);
}

at::Tensor DecodeExecution::own_rows(int64_t slot, int64_t part, int64_t first, int64_t count) const {
  return slots_[slot].rows[part].narrow(2, first, count);
}

// ---- attention over all (or the window's) rows

namespace {

// Each member over its own rows: members are a batch here, not rows. keys [B, G, N, d], values [B, G, N, v].
PartialAttention attend_members(double scale, const at::Tensor& query_BHd, const at::Tensor& keys, const at::Tensor& values,
                                const at::Tensor& hidden_BN = {}) {
  const int64_t members = query_BHd.size(0), heads = query_BHd.size(1), groups = keys.size(1);
  const auto wide = core::device::accumulation_dtype(query_BHd.scalar_type());
  const at::Tensor query = query_BHd.reshape({members, groups, heads / groups, query_BHd.size(2)});
  at::Tensor scores = at::matmul(query, keys.transpose(2, 3)).to(wide).mul_(scale);
  if (hidden_BN.defined()) scores.masked_fill_(hidden_BN.unsqueeze(1).unsqueeze(1), -INFINITY);
  const at::Tensor lse = at::logsumexp(scores, {3}, /*keepdim=*/true);
  const at::Tensor out = at::matmul(at::exp(scores - lse).to(values.scalar_type()), values).to(wide);
  return {out.reshape({members, heads, values.size(3)}).transpose(0, 1), lse.reshape({members, heads}).transpose(0, 1)};
}

}  // namespace

at::Tensor DecodeExecution::attend_rows(int64_t slot, double scale, const std::optional<int64_t>& window,
                                        const at::Tensor& query_BHd, const std::optional<int64_t>& value_width) const {
  const int64_t position = past_tokens_ + tokens_;
  const int64_t first = window ? std::max<int64_t>(0, position - *window + 1) : 0;
  const auto values_of = [&](const at::Tensor& keys, const auto& second) {
    return value_width ? keys.narrow(-1, 0, *value_width) : second();
  };
  PartialAttention merged;
  if (first < past_tokens_) {
    const at::Tensor keys = past_.rows(slot, 0, first, past_tokens_ - first);
    const at::Tensor values = values_of(keys, [&] { return past_.rows(slot, 1, first, past_tokens_ - first); });
    merged = attend_block(query_BHd.transpose(0, 1), keys, values, scale, {});
  }
  const int64_t own_first = std::max<int64_t>(0, first - past_tokens_), own = tokens_ + 1 - own_first;
  const at::Tensor keys = own_rows(slot, 0, own_first, own);
  const at::Tensor values = values_of(keys, [&] { return own_rows(slot, 1, own_first, own); });
  merge_partial(merged, attend_members(scale, query_BHd, keys, values));
  return merged.out_HTd.to(query_BHd.scalar_type()).transpose(0, 1);
}

at::Tensor DecodeExecution::attention(const AttentionSpec& spec, const at::Tensor& query_BHd, const at::Tensor& key_BGd,
                                      const at::Tensor& value_BGd) {
  keep_keys_values(spec, key_BGd, value_BGd);
  return attend_rows(spec.slot, spec.scale, spec.window, query_BHd, std::nullopt);
}

void DecodeExecution::keep_keys_values(const AttentionSpec& spec, const at::Tensor& key_BGd, const at::Tensor& value_BGd) {
  keep_row(spec.slot, 0, key_BGd);
  keep_row(spec.slot, 1, value_BGd);
}

// ---- latents

at::Tensor DecodeExecution::latent_attention(const LatentSpec& spec, const at::Tensor& query_plain_BHn,
                                             const at::Tensor& query_rotary_BHr, const at::Tensor& latent_Bl,
                                             const at::Tensor& rotary_key_Br, const Parameter& kv_b) {
  keep_latents(spec, latent_Bl, rotary_key_Br);
  const int64_t heads = query_plain_BHn.size(1), plain = query_plain_BHn.size(2), latent = latent_Bl.size(1);
  const at::Tensor kv_b_Hol = kv_b.value.detach().view({heads, -1, latent});
  const at::Tensor value_Hvl = kv_b_Hol.narrow(1, plain, kv_b_Hol.size(1) - plain);
  const at::Tensor absorbed_BHl = at::bmm(query_plain_BHn.transpose(0, 1), kv_b_Hol.narrow(1, 0, plain)).transpose(0, 1);
  const at::Tensor query_BHw = at::cat({absorbed_BHl, query_rotary_BHr}, -1);
  const at::Tensor mixed_BHl = spec.sparse ? attend_selected(spec.slot, spec.scale, query_BHw, latent)
                                           : attend_rows(spec.slot, spec.scale, std::nullopt, query_BHw, latent);
  return at::bmm(mixed_BHl.transpose(0, 1), value_Hvl.transpose(1, 2)).transpose(0, 1);
}

void DecodeExecution::keep_latents(const LatentSpec& spec, const at::Tensor& latent_Bl, const at::Tensor& rotary_key_Br) {
  keep_row(spec.slot, 0, at::cat({latent_Bl, rotary_key_Br}, -1).unsqueeze(1));
}

at::Tensor DecodeExecution::attend_selected(int64_t slot, double scale, const at::Tensor& query_BHw, int64_t value_width) const {
  const int64_t members = query_BHw.size(0), width = query_BHw.size(2), listed = selection_BK_.size(1);
  const at::Tensor absent_BK = selection_BK_.lt(0);
  at::Tensor keys_BKw = at::zeros({members, listed, width}, query_BHw.options());
  for (int64_t b = 0; b < members; ++b) {
    const at::Tensor positions_K = selection_BK_[b];
    const at::Tensor in_past = at::nonzero(positions_K.ge(0).logical_and(positions_K.lt(past_tokens_))).squeeze(1);
    const at::Tensor in_own = at::nonzero(positions_K.ge(past_tokens_)).squeeze(1);
    if (past_tokens_ > 0) {
      const at::Tensor past_Nw = past_.rows(slot, 0, 0, past_tokens_).squeeze(0);
      keys_BKw[b].index_copy_(0, in_past, past_Nw.index_select(0, positions_K.index_select(0, in_past)));
    }
    const at::Tensor own_Nw = own_rows(slot, 0, 0, tokens_ + 1)[b].squeeze(0);
    keys_BKw[b].index_copy_(0, in_own, own_Nw.index_select(0, positions_K.index_select(0, in_own) - past_tokens_));
  }
  const at::Tensor keys = keys_BKw.unsqueeze(1);
  return attend_members(scale, query_BHw, keys, keys.narrow(-1, 0, value_width), absent_BK)
      .out_HTd.to(query_BHw.scalar_type())
      .transpose(0, 1);
}

// Candidates are the best of the past with the token itself (in one scan, shared by all members) and all own tokens; the best
// of these are the best of all. Of equal scores the lower position comes first, as everywhere.
void DecodeExecution::select_keys(const IndexerSpec& spec, const at::Tensor& query_Bhd, const at::Tensor& key_Bd,
                                  const at::Tensor& weight_Bh) {
  keep_index_keys(spec, key_Bd);
  const int64_t members = query_Bhd.size(0);
  SelectionInput input{.query_Shd = query_Bhd,
                       .own_key_Sd = key_Bd,
                       .past_key_Nd = past_.rows(spec.slot, 0, 0, past_tokens_).squeeze(0),
                       .weight_Sh = weight_Bh,
                       .spans = {},
                       .top_k = spec.top_k};
  for (int64_t b = 0; b < members; ++b) input.spans.push_back({b, b + 1});
  const at::Tensor of_past = select_top_keys(input).to(at::kLong);
  std::vector<at::Tensor> chosen;
  const auto wide = weight_Bh.scalar_type();
  for (int64_t b = 0; b < members; ++b) {
    const at::Tensor past_K = of_past[b].masked_select(of_past[b].ge(0).logical_and(of_past[b].lt(past_tokens_)));
    const at::Tensor own_N = at::arange(past_tokens_, past_tokens_ + tokens_ + 1, past_K.options());
    const at::Tensor keys_Md =
        at::cat({input.past_key_Nd.index_select(0, past_K), own_rows(spec.slot, 0, 0, tokens_ + 1)[b].squeeze(0)});
    const at::Tensor products_hM = at::relu(at::mm(query_Bhd[b].to(wide), keys_Md.to(wide).t()));
    const at::Tensor score_M = at::matmul(weight_Bh[b], products_hM);
    const at::Tensor order_M = std::get<1>(at::sort(score_M, /*stable=*/true, -1, /*descending=*/true));
    const at::Tensor best = order_M.narrow(0, 0, std::min(spec.top_k, order_M.size(0)));
    chosen.push_back(std::get<0>(at::cat({past_K, own_N}).index_select(0, best).sort()));
  }
  int64_t longest = 0;
  for (const at::Tensor& positions : chosen) longest = std::max(longest, positions.size(0));
  selection_BK_ = at::full({members, longest}, -1, of_past.options());
  for (int64_t b = 0; b < members; ++b) selection_BK_[b].narrow(0, 0, chosen[b].size(0)).copy_(chosen[b]);
}

void DecodeExecution::keep_index_keys(const IndexerSpec& spec, const at::Tensor& key_Bd) {
  keep_row(spec.slot, 0, key_Bd.unsqueeze(1));
}

// ---- recurrences: every member is a sequence of one token

at::Tensor DecodeExecution::causal_convolution(int64_t slot, const at::Tensor& x_BC, const Parameter& weight_C1K,
                                               const Parameter* bias_C) {
  at::Tensor& window = slots_[slot].carried[0];
  const ConvolutionOutput made = causal_convolution_forward({.x_NTC = x_BC.unsqueeze(1),
                                                             .window_NCk = window,
                                                             .weight_C1K = weight_C1K.value.detach(),
                                                             .bias_C = bias_C != nullptr ? bias_C->value.detach() : at::Tensor(),
                                                             .lengths = {}});
  window = made.end_window_NCk;
  return made.out_NTC.squeeze(1);
}

at::Tensor DecodeExecution::gated_delta_rule(int64_t slot, const at::Tensor& query_BGk, const at::Tensor& key_BGk,
                                             const at::Tensor& value_BHv, const at::Tensor& log_decay_BH,
                                             const at::Tensor& beta_BH) {
  at::Tensor& state = slots_[slot].carried[1];
  const DeltaRuleOutput made = delta_rule_forward({.query_NTKd = query_BGk.unsqueeze(1),
                                                   .key_NTKd = key_BGk.unsqueeze(1),
                                                   .value_NTHv = value_BHv.unsqueeze(1),
                                                   .log_decay_NTH = log_decay_BH.unsqueeze(1),
                                                   .beta_NTH = beta_BH.unsqueeze(1),
                                                   .state_NHkv = state,
                                                   .lengths = {}},
                                                  /*chunk=*/1, /*for_backward=*/false);
  state = made.end_state_NHkv;
  return made.out_NTHv.squeeze(1);
}

at::Tensor DecodeExecution::state_space(int64_t slot, const at::Tensor& x_BHp, const at::Tensor& dt_BH, const at::Tensor& a_H,
                                        const at::Tensor& b_BGn, const at::Tensor& c_BGn) {
  at::Tensor& state = slots_[slot].carried[1];
  const StateSpaceOutput made = state_space_forward({.x_NTHp = x_BHp.unsqueeze(1),
                                                     .dt_NTH = dt_BH.unsqueeze(1),
                                                     .a_H = a_H,
                                                     .b_NTGn = b_BGn.unsqueeze(1),
                                                     .c_NTGn = c_BGn.unsqueeze(1),
                                                     .state_NHpn = state,
                                                     .lengths = {}},
                                                    /*chunk=*/1, /*for_backward=*/false);
  state = made.end_state_NHpn;
  return made.out_NTHp.squeeze(1);
}

// ---- experts

at::Tensor DecodeExecution::choose_experts(int64_t, const at::Tensor& scores_BE, int64_t k) {
  return std::get<1>(at::sort(scores_BE, /*stable=*/true, /*dim=*/-1, /*descending=*/true)).narrow(-1, 0, k).contiguous();
}

at::Tensor DecodeExecution::experts(const at::Tensor& x_BD, const at::Tensor& chosen_Bk, const at::Tensor& weights_Bk,
                                    const core::model::ExpertWeights& experts) {
  return grouped_experts_forward(x_BD, chosen_Bk, weights_Bk, experts, /*keep_products=*/false).out_SD;
}

}  // namespace longstraw
