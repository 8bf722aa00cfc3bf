// The recurrent mixers, token by token as their equations stand. Batched over heads, never over tokens.
#include "reference/textbook.h"
#include "reference/whole_sequence.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <functional>

namespace longstraw::reference {

namespace {

// x · rsqrt(Σx² + 1e-6): of length 1, and 0 where x is.
at::Tensor unit_length(const at::Tensor& x) { return x * at::rsqrt(x.square().sum(-1, /*keepdim=*/true) + 1e-6); }

// One token: the state before it -> the state after it and the token's output.
using Step = std::function<std::pair<at::Tensor, at::Tensor>(size_t t, const at::Tensor& state)>;

// Outputs [S, ...] of a recurrence from `state`; the state after `cut` tokens is a constant.
at::Tensor scan(int64_t tokens, int64_t cut, at::Tensor state, const Step& step) {
  std::vector<at::Tensor> outputs;
  for (int64_t t = 0; t < tokens; ++t) {
    // No gradient reaches what is before the cut, so it needs no graph; the values are the same.
    const at::AutoGradMode graph(at::GradMode::is_enabled() && t >= cut);
    auto [next, output] = step(size_t(t), state);
    state = next;
    outputs.push_back(output);
  }
  return at::stack(outputs);
}

}  // namespace

at::Tensor WholeSequence::causal_convolution(int64_t, const at::Tensor& x_SC, const core::model::Parameter& weight_C1K,
                                             const core::model::Parameter* bias_C) {
  const at::ScalarType dtype = x_SC.scalar_type(), sum_dtype = wide(dtype);
  const int64_t tokens = x_SC.size(0), channels = x_SC.size(1), taps = weight_C1K.value.size(-1);
  const at::Tensor weight_CK = value(weight_C1K).squeeze(1).to(sum_dtype);
  // Outputs before the cut read constants too: no gradient reaches them.
  const at::Tensor seen_SC = cut_before(x_SC, cut_).to(sum_dtype);
  const at::Tensor padded_C = at::cat({at::zeros({taps - 1, channels}, seen_SC.options().requires_grad(false)), seen_SC}, 0);
  at::Tensor sum_SC = bias_C ? value(*bias_C).to(sum_dtype).expand({tokens, channels})
                             : at::zeros({tokens, channels}, seen_SC.options().requires_grad(false));
  for (int64_t j = 0; j < taps; ++j) sum_SC = sum_SC + weight_CK.select(1, j) * padded_C.narrow(0, j, tokens);
  return at::silu(sum_SC.to(dtype));
}

at::Tensor WholeSequence::gated_delta_rule(int64_t, const at::Tensor& query_SGk, const at::Tensor& key_SGk,
                                           const at::Tensor& value_SHv, const at::Tensor& log_decay_SH, const at::Tensor& beta_SH) {
  const at::ScalarType dtype = wide(value_SHv.scalar_type());
  const int64_t heads = value_SHv.size(1), key_size = key_SGk.size(-1), value_size = value_SHv.size(-1);
  const double scale = 1.0 / std::sqrt(double(key_size));
  const at::Tensor query_SHk = for_each_head(unit_length(query_SGk.to(dtype)) * scale, heads);
  const at::Tensor key_SHk = for_each_head(unit_length(key_SGk.to(dtype)), heads);

  // unbind, not indexing by token: the gradient of an index is a tensor of all tokens.
  const auto query = query_SHk.unsqueeze(2).unbind(), key = key_SHk.unsqueeze(2).unbind();  // [H, 1, k] each
  const auto value = value_SHv.to(dtype).unsqueeze(2).unbind();                             // [H, 1, v]
  const auto decay = log_decay_SH.to(dtype).exp().unsqueeze(-1).unsqueeze(-1).unbind();     // [H, 1, 1]
  const auto beta = beta_SH.to(dtype).unsqueeze(-1).unsqueeze(-1).unbind();                 // [H, 1, 1]

  const auto step = [&](size_t t, const at::Tensor& before_Hkv) {
    const at::Tensor decayed_Hkv = decay[t] * before_Hkv;
    const at::Tensor missing_H1v = beta[t] * (value[t] - at::matmul(key[t], decayed_Hkv));
    const at::Tensor state_Hkv = decayed_Hkv + key[t].transpose(1, 2) * missing_H1v;
    return std::pair(state_Hkv, at::matmul(query[t], state_Hkv).squeeze(1));
  };
  const at::Tensor start_Hkv = at::zeros({heads, key_size, value_size}, value_SHv.options().dtype(dtype).requires_grad(false));
  return scan(value_SHv.size(0), cut_, start_Hkv, step).to(value_SHv.scalar_type());
}

at::Tensor WholeSequence::state_space(int64_t, const at::Tensor& x_SHp, const at::Tensor& dt_SH, const at::Tensor& a_H,
                                      const at::Tensor& b_SGn, const at::Tensor& c_SGn) {
  const at::ScalarType dtype = wide(x_SHp.scalar_type());
  const int64_t heads = x_SHp.size(1), head_size = x_SHp.size(2), state_size = b_SGn.size(-1);
  const at::Tensor wide_dt_SH = dt_SH.to(dtype);

  const auto decay = (wide_dt_SH * a_H.to(dtype)).exp().unsqueeze(-1).unsqueeze(-1).unbind();  // [H, 1, 1] each
  const auto input = (wide_dt_SH.unsqueeze(-1) * x_SHp.to(dtype)).unsqueeze(-1).unbind();      // [H, p, 1]
  const auto b = for_each_head(b_SGn.to(dtype), heads).unsqueeze(2).unbind();                  // [H, 1, n]
  const auto c = for_each_head(c_SGn.to(dtype), heads).unsqueeze(-1).unbind();                 // [H, n, 1]

  const auto step = [&](size_t t, const at::Tensor& before_Hpn) {
    const at::Tensor state_Hpn = decay[t] * before_Hpn + input[t] * b[t];
    return std::pair(state_Hpn, at::matmul(state_Hpn, c[t]).squeeze(-1));
  };
  const at::Tensor start_Hpn = at::zeros({heads, head_size, state_size}, x_SHp.options().dtype(dtype).requires_grad(false));
  return scan(x_SHp.size(0), cut_, start_Hpn, step).to(x_SHp.scalar_type());
}

}  // namespace longstraw::reference
