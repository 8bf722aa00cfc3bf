#include "core/model/traced_execution.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

namespace longstraw::core::model {

namespace {

// Elements that are widened to float64 at once: a trace shall not raise a run's peak.
constexpr int64_t kWidened = 1 << 17;

uint64_t splitmix64(uint64_t z) {
  z += 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// A hash of each element, on its device; -1, which fills a choice of fewer, has 0. int64 products wrap around.
at::Tensor hashed(const at::Tensor& chosen) {
  at::Tensor z = chosen.to(at::kLong) + 1;
  const at::Tensor empty = z == 0;
  const auto mixed = [](const at::Tensor& x, int shift, uint64_t factor) {
    // The shift of a negative number would bring ones from the left.
    const at::Tensor shifted = at::bitwise_and(at::bitwise_right_shift(x, shift), (int64_t{1} << (64 - shift)) - 1);
    return at::bitwise_xor(x, shifted) * static_cast<int64_t>(factor);
  };
  z = mixed(z * static_cast<int64_t>(0x9e3779b97f4a7c15ULL), 30, 0xbf58476d1ce4e5b9ULL);
  z = mixed(mixed(z, 27, 0x94d049bb133111ebULL), 31, 1);
  return z.masked_fill(empty, 0);
}

}  // namespace

Trace TracePoints::trace(int64_t begin, int64_t count) const {
  Trace trace;
  if (points.empty()) return trace;
  std::vector<at::Tensor> numbers;
  for (const auto& [point, numbers_n] : points) numbers.push_back(numbers_n.narrow(0, begin, count));
  const at::Tensor all = at::stack(numbers).to(at::kCPU);  // one copy from the device
  for (size_t i = 0; i < points.size(); ++i) {
    const double* first = all.const_data_ptr<double>() + static_cast<int64_t>(i) * count;
    trace[points[i].first].assign(first, first + count);
  }
  return trace;
}

at::Tensor TracedExecution::rows_of(const at::Tensor& x) const { return x.detach().narrow(0, begin_, count_); }

const at::Tensor& TracedExecution::direction(int64_t width, c10::Device device) {
  at::Tensor& direction = directions_[width];
  if (direction.defined()) return direction;
  const at::Tensor factors = at::empty({width}, at::kDouble);
  double* factor = factors.mutable_data_ptr<double>();
  for (int64_t i = 0; i < width; ++i) factor[i] = static_cast<double>(splitmix64(static_cast<uint64_t>(i)) >> 11) * 0x1p-52 - 1.0;
  return direction = factors.to(device);
}

const at::Tensor& TracedExecution::seen(const char* operation, const at::Tensor& x) {
  const at::NoGradGuard no_grad;
  const at::Tensor rows_nw = rows_of(x).flatten(1);
  const int64_t width = rows_nw.size(1), at_once = std::max<int64_t>(1, kWidened / std::max<int64_t>(1, width));
  const at::Tensor numbers_n = at::empty({count_}, rows_nw.options().dtype(at::kDouble));
  for (int64_t row = 0; row < count_; row += at_once) {
    const int64_t rows = std::min(at_once, count_ - row);
    numbers_n.narrow(0, row, rows).copy_(at::mv(rows_nw.narrow(0, row, rows).to(at::kDouble), direction(width, x.device())));
  }
  keep(operation, numbers_n);
  return x;
}

void TracedExecution::seen_choice(const char* operation, const at::Tensor& chosen_nk) {
  const at::NoGradGuard no_grad;
  // A sum does not depend on the order; of 53 bits a double loses none.
  keep(operation, at::bitwise_and(hashed(chosen_nk).sum(-1), (int64_t{1} << 53) - 1).to(at::kDouble));
}

void TracedExecution::keep(const char* operation, at::Tensor numbers_n) {
  points_.points.emplace_back(fmt::format("{:04d}.{}", points_.points.size(), operation), std::move(numbers_n));
}

at::Tensor TracedExecution::embedding(const at::Tensor& ids_S, const Parameter& weight_VD) {
  return seen("embedding", DelegatingExecution::embedding(ids_S, weight_VD));
}

at::Tensor TracedExecution::linear(const at::Tensor& x, const Parameter& weight_OI, const Parameter* bias_O) {
  return seen("linear", DelegatingExecution::linear(x, weight_OI, bias_O));
}

at::Tensor TracedExecution::rms_norm(const at::Tensor& x, const Parameter& weight, double eps, bool zero_centred) {
  return seen("rms_norm", DelegatingExecution::rms_norm(x, weight, eps, zero_centred));
}

at::Tensor TracedExecution::swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return seen("swiglu", DelegatingExecution::swiglu(gate, up));
}

at::Tensor TracedExecution::rotate(const at::Tensor& x_Shd, const RotaryTable& table) {
  return seen("rotate", DelegatingExecution::rotate(x_Shd, table));
}

at::Tensor TracedExecution::add(const at::Tensor& hidden, const at::Tensor& update) {
  seen("add", update);
  return DelegatingExecution::add(hidden, update);
}

at::Tensor TracedExecution::attention(const AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                                      const at::Tensor& value_SGd) {
  return seen("attention", DelegatingExecution::attention(spec, query_SHd, key_SGd, value_SGd));
}

at::Tensor TracedExecution::latent_attention(const LatentSpec& spec, const at::Tensor& query_plain_SHn,
                                             const at::Tensor& query_rotary_SHr, const at::Tensor& latent_Sl,
                                             const at::Tensor& rotary_key_Sr, const Parameter& kv_b) {
  return seen("latent_attention",
              DelegatingExecution::latent_attention(spec, query_plain_SHn, query_rotary_SHr, latent_Sl, rotary_key_Sr, kv_b));
}

void TracedExecution::select_keys(const IndexerSpec& spec, const at::Tensor& query_Shd, const at::Tensor& key_Sd,
                                  const at::Tensor& weight_Sh) {
  DelegatingExecution::select_keys(spec, query_Shd, key_Sd, weight_Sh);
  seen_choice("keys", selected_keys(begin_, count_));
}

at::Tensor TracedExecution::causal_convolution(int64_t slot, const at::Tensor& x_SC, const Parameter& weight_C1K,
                                               const Parameter* bias_C) {
  return seen("convolution", DelegatingExecution::causal_convolution(slot, x_SC, weight_C1K, bias_C));
}

at::Tensor TracedExecution::gated_delta_rule(int64_t slot, const at::Tensor& query_SGk, const at::Tensor& key_SGk,
                                             const at::Tensor& value_SHv, const at::Tensor& log_decay_SH,
                                             const at::Tensor& beta_SH) {
  return seen("delta_rule", DelegatingExecution::gated_delta_rule(slot, query_SGk, key_SGk, value_SHv, log_decay_SH, beta_SH));
}

at::Tensor TracedExecution::state_space(int64_t slot, const at::Tensor& x_SHp, const at::Tensor& dt_SH, const at::Tensor& a_H,
                                        const at::Tensor& b_SGn, const at::Tensor& c_SGn) {
  return seen("state_space", DelegatingExecution::state_space(slot, x_SHp, dt_SH, a_H, b_SGn, c_SGn));
}

at::Tensor TracedExecution::choose_experts(int64_t router, const at::Tensor& scores_SE, int64_t k) {
  const at::Tensor chosen_Sk = DelegatingExecution::choose_experts(router, scores_SE, k);
  seen_choice("experts", rows_of(chosen_Sk));
  return chosen_Sk;
}

at::Tensor TracedExecution::experts(const at::Tensor& x_SD, const at::Tensor& chosen_Sk, const at::Tensor& weights_Sk,
                                    const ExpertWeights& experts) {
  seen("routing_weights", weights_Sk.detach().gather(-1, at::argsort(chosen_Sk, /*stable=*/true, /*dim=*/-1)));
  return seen("mixed_experts", DelegatingExecution::experts(x_SD, chosen_Sk, weights_Sk, experts));
}

}  // namespace longstraw::core::model
