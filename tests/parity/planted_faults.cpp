#include "tests/parity/planted_faults.h"

#include "core/model/delegating_execution.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>

namespace longstraw::test {
namespace {

using core::model::Decoder;
using core::model::DelegatingExecution;
using core::model::Execution;
using core::model::MixerState;
using StateUse = SegmentExecution::StateUse;

// --- a recurrence that decays its state after it was written to, instead of before

// With U the state before its decay, S_t = d_t U_t and the wrong rule is the right one with each decay a token late,
//   U_t = step(d_{t-1} U_{t-1}),  output_t = d_t (U_t read as the right rule reads it).
class DecayAfterTheStep final : public DelegatingExecution {
 public:
  // The last row of what decays at each border, which the next segment begins with; by slot and position.
  using Borders = std::map<std::pair<int64_t, int64_t>, at::Tensor>;

  DecayAfterTheStep(Execution& execution, const SegmentExecution::Options& options, Borders& borders)
      : DelegatingExecution(execution), options_(options), borders_(borders) {}

  at::Tensor gated_delta_rule(int64_t slot, const at::Tensor& query_SGk, const at::Tensor& key_SGk, const at::Tensor& value_SHv,
                              const at::Tensor& log_decay_SH, const at::Tensor& beta_SH) override {
    const at::Tensor late_SH = a_token_late(slot, log_decay_SH);
    const at::Tensor out = DelegatingExecution::gated_delta_rule(slot, query_SGk, key_SGk, value_SHv, late_SH, beta_SH);
    return out * log_decay_SH.exp().unsqueeze(-1);
  }
  at::Tensor state_space(int64_t slot, const at::Tensor& x_SHp, const at::Tensor& dt_SH, const at::Tensor& a_H,
                         const at::Tensor& b_SGn, const at::Tensor& c_SGn) override {
    // dt is in the input too, where it stays in time.
    const at::Tensor late_SH = a_token_late(slot, dt_SH);
    const at::Tensor x = x_SHp * (dt_SH / late_SH).unsqueeze(-1);
    return DelegatingExecution::state_space(slot, x, late_SH, a_H, b_SGn, c_SGn) * (dt_SH * a_H).exp().unsqueeze(-1);
  }

 private:
  at::Tensor a_token_late(int64_t slot, const at::Tensor& x_SH) {
    const int64_t begin = options_.past.tokens;
    std::vector<at::Tensor> late;
    for (const Span& span : options_.spans) {
      const at::Tensor own = x_SH.narrow(0, span.begin, span.end - span.begin);
      const auto border = borders_.find({slot, begin});
      // Before the first token there is no state to decay.
      late.push_back(border == borders_.end() ? own.narrow(0, 0, 1).detach() : border->second);
      late.push_back(own.narrow(0, 0, own.size(0) - 1));
      if (options_.state_use != StateUse::kLeave) borders_[{slot, begin + span.end}] = own.narrow(0, own.size(0) - 1, 1).detach();
    }
    return at::cat(late);
  }

  const SegmentExecution::Options& options_;
  Borders& borders_;
};

Fault decay_after_the_step(const char* name) {
  const auto borders = std::make_shared<DecayAfterTheStep::Borders>();
  return {.what = "decay after the step", .name = name, .operation = [borders](Execution& execution, const ForwardPass& pass) {
            return std::make_unique<DecayAfterTheStep>(execution, pass.options, *borders);
          }};
}

// --- experts

// The scores that chose the experts, balancing bias and all, are their weights as well; of the right sum.
class BiasInRoutingWeights final : public DelegatingExecution {
 public:
  using DelegatingExecution::DelegatingExecution;

  at::Tensor choose_experts(int64_t router, const at::Tensor& scores_SE, int64_t k) override {
    const at::Tensor chosen_Sk = DelegatingExecution::choose_experts(router, scores_SE, k);
    biased_Sk_ = scores_SE.gather(-1, chosen_Sk);
    return chosen_Sk;
  }
  at::Tensor experts(const at::Tensor& x_SD, const at::Tensor& chosen_Sk, const at::Tensor& weights_Sk,
                     const core::model::ExpertWeights& experts) override {
    const at::Tensor share_Sk = biased_Sk_ / biased_Sk_.sum(-1, /*keepdim=*/true);
    const at::Tensor wrong_Sk = (share_Sk * weights_Sk.sum(-1, /*keepdim=*/true)).to(weights_Sk.scalar_type());
    return DelegatingExecution::experts(x_SD, chosen_Sk, wrong_Sk, experts);
  }

 private:
  at::Tensor biased_Sk_;
};

Fault bias_in_routing_weights() {
  return {.what = "bias in routing weights",
          .name = "wrong_routing_weights",
          .operation = {},
          .block = [](Execution& execution, const ForwardPass&) { return std::make_unique<BiasInRoutingWeights>(execution); }};
}

// A segment that is computed again gets other routes, those of the token before, from a router that does not tell: nothing
// counts them, and only the gradient shows it.
class OtherRoutes final : public DelegatingExecution {
 public:
  using DelegatingExecution::DelegatingExecution;
  at::Tensor choose_experts(int64_t router, const at::Tensor& scores_SE, int64_t k) override {
    return DelegatingExecution::choose_experts(router, scores_SE, k).roll(1, 0);
  }
};

Fault other_routes() {
  return {.what = "other routes, not counted",
          .name = "stale_route_at_recompute",
          .also = "changed_recompute",
          .operation = [](Execution& execution, const ForwardPass& pass) -> std::unique_ptr<Execution> {
            if (pass.options.state_use != StateUse::kVerify) return nullptr;
            return std::make_unique<OtherRoutes>(execution);
          }};
}

// The routes that were stored at capture are those of the token before when the segment is computed again.
Fault stale_routes(const Decoder& decoder) {
  const auto routers = static_cast<int64_t>(decoder.routers().size());
  return {.what = "stale routes at recompute",
          .name = "stale_route_at_recompute",
          .also = {},
          .operation = [routers](Execution&, const ForwardPass& pass) -> std::unique_ptr<Execution> {
            const auto& [state, begin, adjoint_from] = pass.options.past;
            if (pass.options.state_use != StateUse::kVerify) return nullptr;
            for (int64_t router = 0; router < routers; ++router) {
              const at::Tensor chosen_Sk = state->routes(router, begin, pass.options.spans.front().end);
              if (chosen_Sk.defined()) state->write_routes(router, begin, chosen_Sk.roll(1, 0));
            }
            return nullptr;
          }};
}

// --- latent attention, with keys and values expanded for every head and a selection as a mask

class ExpandedLatents final : public DelegatingExecution {
 public:
  struct Wrong {
    // Keys are in two shards, apart at this position, and each shard selects half of top-k by itself.
    std::optional<int64_t> shard_border = {};
    // kv_b is a constant where it expands prompt positions.
    bool constant_expansion = false;
  };
  ExpandedLatents(Execution& execution, const SegmentExecution::Options& options, Wrong wrong)
      : DelegatingExecution(execution), options_(options), wrong_(wrong) {}

  void select_keys(const core::model::IndexerSpec& spec, const at::Tensor& query_Shd, const at::Tensor& key_Sd,
                   const at::Tensor& weight_Sh) override {
    const at::NoGradGuard no_grad;
    keep_index_keys(spec, key_Sd);
    const at::Tensor past_Nd = options_.past.state->rows(spec.slot, 0, 0, options_.past.tokens).squeeze(0);
    selected_.clear();
    for (const Span& span : options_.spans) {
      const auto own = [&](const at::Tensor& x) { return x.detach().narrow(0, span.begin, span.end - span.begin); };
      const at::Tensor keys_Td = at::cat({past_Nd, own(key_Sd)});
      const at::Tensor products_nhT = at::relu(at::matmul(own(query_Shd), keys_Td.t()));
      const at::Tensor score_nT = (own(weight_Sh).unsqueeze(-1) * products_nhT).sum(1);
      selected_.push_back(largest(score_nT, spec.top_k));
    }
  }

  at::Tensor selected_keys(int64_t begin, int64_t count) const override {
    int64_t longest = 0;
    for (const at::Tensor& selected_nT : selected_) longest = std::max(longest, selected_nT.size(1));
    std::vector<at::Tensor> rows;
    for (const at::Tensor& selected_nT : selected_) {
      const at::Tensor position_T = at::arange(selected_nT.size(1), at::kLong);
      const at::Tensor chosen_nT = at::where(selected_nT, position_T, at::scalar_tensor(-1, at::kLong));
      rows.push_back(at::constant_pad_nd(chosen_nT, {0, longest - selected_nT.size(1)}, -1));
    }
    return at::cat(rows).narrow(0, begin, count);
  }

  at::Tensor latent_attention(const core::model::LatentSpec& spec, const at::Tensor& query_plain_SHn,
                              const at::Tensor& query_rotary_SHr, const at::Tensor& latent_Sl, const at::Tensor& rotary_key_Sr,
                              const core::model::Parameter& kv_b) override {
    keep_latents(spec, latent_Sl, rotary_key_Sr);
    const at::Tensor weight = value(kv_b), prompt_weight = wrong_.constant_expansion ? kv_b.value.detach() : weight;
    const bool in_prompt = options_.state_use != StateUse::kLeave;
    const int64_t heads = query_plain_SHn.size(1), plain = query_plain_SHn.size(2);
    const at::Tensor past_Nw = past_rows(spec.slot), own_Sw = at::cat({latent_Sl, rotary_key_Sr}, -1);
    std::vector<at::Tensor> mixed;
    for (size_t i = 0; i < options_.spans.size(); ++i) {
      const Span& span = options_.spans[i];
      const auto own = [&](const at::Tensor& x) { return x.narrow(0, span.begin, span.end - span.begin); };
      const auto [past_key, past_value] = expanded(past_Nw, latent_Sl.size(1), prompt_weight, heads, plain);
      const auto [own_key, own_value] = expanded(own(own_Sw), latent_Sl.size(1), in_prompt ? prompt_weight : weight, heads, plain);
      const at::Tensor key_HTd = at::cat({past_key, own_key}).transpose(0, 1),
                       value_HTv = at::cat({past_value, own_value}).transpose(0, 1);
      const at::Tensor query_HSd = at::cat({own(query_plain_SHn), own(query_rotary_SHr)}, -1).transpose(0, 1);
      const at::Tensor seen_ST = spec.sparse ? selected_.at(i) : visible(query_HSd.size(1), key_HTd.size(1));
      const at::Tensor scores_HST = at::matmul(query_HSd, key_HTd.transpose(1, 2)) * spec.scale;
      const at::Tensor share_HST =
          at::softmax(scores_HST.masked_fill(seen_ST.logical_not(), -std::numeric_limits<double>::infinity()), -1);
      mixed.push_back(at::matmul(share_HST, value_HTv).transpose(0, 1));
    }
    return at::cat(mixed);
  }

 private:
  at::Tensor visible(int64_t queries, int64_t keys) const { return at::ones({queries, keys}, at::kBool).tril(keys - queries); }

  // The k largest a row (in each shard, half of them) of the keys that its token sees; of equal ones the first.
  at::Tensor largest(const at::Tensor& score_nT, int64_t k) const {
    const at::Tensor visible_nT = visible(score_nT.size(0), score_nT.size(1));
    const at::Tensor seen_nT = score_nT.masked_fill(visible_nT.logical_not(), -std::numeric_limits<double>::infinity());
    at::Tensor taken_nT = at::zeros_like(visible_nT);
    const auto take = [&](int64_t begin, int64_t end, int64_t count) {
      if (begin >= end) return;
      const at::Tensor order = at::argsort(seen_nT.narrow(1, begin, end - begin), /*stable=*/true, -1, /*descending=*/true);
      taken_nT.narrow(1, begin, end - begin).scatter_(1, order.narrow(1, 0, std::min(count, end - begin)), true);
    };
    const int64_t keys = score_nT.size(1), border = std::min(wrong_.shard_border.value_or(keys), keys);
    take(0, border, wrong_.shard_border ? k / 2 : k);
    take(border, keys, k - k / 2);
    return taken_nT.logical_and(visible_nT);
  }

  // A leaf, whose gradient goes to the state's adjoint.
  at::Tensor past_rows(int64_t slot) const {
    const Past past = options_.past;
    const at::Tensor rows_Nw = past.state->rows(slot, 0, 0, past.tokens).squeeze(0).detach().clone();
    if (!at::GradMode::is_enabled() || !past.carries_gradient()) return rows_Nw;
    rows_Nw.requires_grad_();
    rows_Nw.register_hook([past, slot](const at::Tensor& grad_Nw) {
      const int64_t from = std::max(past.adjoint_from, past.state->adjoint_begin()), count = past.tokens - from;
      past.state->rows_adjoint(slot, 0, from, count).squeeze(0).add_(grad_Nw.narrow(0, from, count));
    });
    return rows_Nw;
  }

  // Keys [T, H, plain + rotary] and values [T, H, v] of rows [c | r].
  static std::pair<at::Tensor, at::Tensor> expanded(const at::Tensor& rows_Tw, int64_t latent, const at::Tensor& weight,
                                                    int64_t heads, int64_t plain) {
    const at::Tensor both_THe = at::linear(rows_Tw.narrow(-1, 0, latent), weight).unflatten(-1, {heads, -1});
    const at::Tensor rotary_THr = rows_Tw.narrow(-1, latent, rows_Tw.size(1) - latent).unsqueeze(1).expand({-1, heads, -1});
    return {at::cat({both_THe.narrow(-1, 0, plain), rotary_THr}, -1), both_THe.narrow(-1, plain, both_THe.size(-1) - plain)};
  }

  const SegmentExecution::Options& options_;
  Wrong wrong_;
  std::vector<at::Tensor> selected_;  // by span, bool [queries, past and own keys]
};

Fault latent_fault(const char* what, const char* name, ExpandedLatents::Wrong wrong) {
  return {.what = what, .name = name, .operation = [wrong](Execution& execution, const ForwardPass& pass) {
            return std::make_unique<ExpandedLatents>(execution, pass.options, wrong);
          }};
}

// --- adjoints that are lost at every border of a segment

Fault lost_carried(const Decoder& decoder, const char* part, const char* name) {
  return {.what = std::string("lost adjoint: ") + part,
          .name = name,
          .operation = {},
          .block = {},
          .before_backward = [&decoder, part](const Node& node, const PromptState& state) {
            for (size_t slot = 0; slot < decoder.states().size(); ++slot) {
              const auto& carried = decoder.states()[slot].carried;
              for (size_t p = 0; p < carried.size(); ++p) {
                const at::Tensor adjoint = state.carried_adjoint(int64_t(slot), int64_t(p), node.end());
                if (carried[p].name == part && adjoint.defined()) adjoint.zero_();
              }
            }
          }};
}

// Of rows of this name, columns [begin, end) from the front, or from the back where they are negative.
Fault lost_rows(const Decoder& decoder, const char* rows_name, const char* what, const char* name, int64_t columns) {
  return {.what = std::string("lost adjoint: ") + what,
          .name = name,
          .operation = {},
          .block = {},
          .before_backward = [&decoder, rows_name, columns](const Node& node, const PromptState& state) {
            for (size_t slot = 0; slot < decoder.states().size(); ++slot) {
              const auto& rows = decoder.states()[slot].rows;
              for (size_t p = 0; p < rows.size(); ++p) {
                if (rows[p].name != rows_name) continue;
                const at::Tensor adjoint = state.rows_adjoint(int64_t(slot), int64_t(p), node.begin, int64_t(node.tokens.size()));
                const int64_t width = adjoint.size(-1);
                adjoint.narrow(-1, columns >= 0 ? 0 : width + columns, columns >= 0 ? std::min(columns, width) : -columns).zero_();
              }
            }
          }};
}

bool has_carried(const Decoder& decoder, const std::string& kind) {
  return std::any_of(decoder.states().begin(), decoder.states().end(), [&](const MixerState& s) { return s.kind == kind; });
}

const MixerState* with_rows(const Decoder& decoder, const std::string& name) {
  for (const MixerState& state : decoder.states()) {
    if (!state.rows.empty() && state.rows.front().name == name) return &state;
  }
  return nullptr;
}

}  // namespace

std::vector<Fault> no_faults_of(const Decoder& decoder) {
  std::vector<Fault> none{{.what = "none"}};
  if (with_rows(decoder, "latent") != nullptr) none.push_back(latent_fault("none, in expanded form", "", {}));
  return none;
}

std::vector<Fault> faults_of(const Decoder& decoder) {
  constexpr int64_t kAll = 1 << 20;
  std::vector<Fault> faults;
  const bool delta = has_carried(decoder, "gated delta rule"), mamba = has_carried(decoder, "mamba-2");
  if (delta || mamba) {
    faults.push_back(lost_carried(decoder, "convolution", "missing_convolution_adjoint"));
    faults.push_back(lost_carried(decoder, "recurrent", "dropped_recurrent_adjoint"));
    faults.push_back(decay_after_the_step(delta ? "wrong_delta_rule" : "wrong_state_space"));
  }
  if (with_rows(decoder, "key") != nullptr) {
    faults.push_back(lost_rows(decoder, "key", "key", "dropped_key_adjoint", kAll));
    faults.push_back(lost_rows(decoder, "value", "value", "dropped_value_adjoint", kAll));
  }
  if (with_rows(decoder, "latent") != nullptr) {
    const int64_t rotary = decoder.architecture().rotary.dims, latent = with_rows(decoder, "latent")->rows.front().width - rotary;
    faults.push_back(lost_rows(decoder, "latent", "latent", "dropped_latent_adjoint", latent));
    faults.push_back(lost_rows(decoder, "latent", "rotary key", "dropped_rotary_key_adjoint", -rotary));
    faults.push_back(
        latent_fault("kv_b constant in the prompt", "missing_latent_expansion_gradient", {.constant_expansion = true}));
  }
  if (with_rows(decoder, "index_key") != nullptr) {
    faults.push_back(latent_fault("top-k within shards", "wrong_key_selection", {.shard_border = 24}));
  }
  if (!decoder.constants().empty()) faults.push_back(bias_in_routing_weights());
  if (!decoder.routers().empty()) {
    faults.push_back(stale_routes(decoder));
    faults.push_back(other_routes());
  }
  return faults;
}

}  // namespace longstraw::test
