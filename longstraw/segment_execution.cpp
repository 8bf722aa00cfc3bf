#include "longstraw/segment_execution.h"

#include "longstraw/autograd_node.h"
#include "longstraw/grouped_experts.h"

#include "core/device/device.h"

#include <ATen/ATen.h>

namespace longstraw {

using core::model::AttentionSpec;
using core::model::Parameter;
using core::model::RotaryTable;

at::Tensor SegmentExecution::value(const Parameter& parameter) {
  if (!parameter.trained) return parameter.value;
  GradientStore* gradients = options_.gradients;
  const Parameter* weight = &parameter;
  return differentiable(parameter.value.detach(), {parameter.value}, [=](const at::Tensor& grad) -> std::vector<at::Tensor> {
    if (gradients->wants(*weight)) gradients->of(*weight).add_(grad);
    return {{}};
  });
}

at::Tensor SegmentExecution::embedding(const at::Tensor& ids_S, const Parameter& weight_VD) {
  GradientStore* gradients = options_.gradients;
  const Parameter* weight = &weight_VD;
  at::Tensor rows = at::embedding(weight_VD.value.detach(), ids_S);
  // The weight is an input only so that a graph begins here: its gradient goes into the store, not to autograd.
  return differentiable(rows, {weight_VD.value}, [=](const at::Tensor& grad) -> std::vector<at::Tensor> {
    if (gradients->wants(*weight)) {
      at::Tensor& sum = gradients->of(*weight);
      sum.index_add_(0, ids_S, grad.to(sum.scalar_type()));
    }
    return {{}};
  });
}

at::Tensor SegmentExecution::linear(const at::Tensor& x, const Parameter& weight_OI, const Parameter* bias_O) {
  GradientStore* gradients = options_.gradients;
  const Parameter* weight = &weight_OI;
  const at::Tensor input = x.detach();
  const at::Tensor bias = bias_O != nullptr ? bias_O->value.detach() : at::Tensor();
  at::Tensor y = at::linear(input, weight_OI.value.detach(), bias.defined() ? std::optional(bias) : std::nullopt);
  // Under frozen weights a graph begins at the first adapter: at its weight, for its input has none.
  const bool from_input = x.requires_grad();
  return differentiable(y, {from_input ? x : weight_OI.value}, [=](const at::Tensor& grad) -> std::vector<at::Tensor> {
    const at::Tensor grad_SO = grad.reshape({-1, grad.size(-1)});
    if (gradients->wants(*weight)) gradients->add_outer(*weight, grad_SO, input.reshape({-1, input.size(-1)}));
    if (bias_O != nullptr && gradients->wants(*bias_O)) gradients->add_rows(*bias_O, grad_SO);
    return {from_input ? at::matmul(grad, weight->value.detach()) : at::Tensor()};
  });
}

at::Tensor SegmentExecution::rms_norm(const at::Tensor& x, const Parameter& weight, double eps, bool zero_centred) {
  GradientStore* gradients = options_.gradients;
  const Parameter* scale = &weight;
  const auto wide = core::device::accumulation_dtype(x.scalar_type());
  const at::Tensor input = x.detach();
  const at::Tensor x_wide = input.to(wide);
  const at::Tensor rstd = at::linalg_vector_norm(x_wide, 2, {-1}, /*keepdim=*/true).square_().div_(x.size(-1)).add_(eps).rsqrt_();
  const at::Tensor factor = zero_centred ? weight.value.detach().to(wide) + 1.0 : weight.value.detach();
  at::Tensor y = at::mul(x_wide, rstd);
  y = zero_centred ? y.mul_(factor).to(x.scalar_type()) : y.to(x.scalar_type()).mul_(factor);
  return differentiable(y, {x}, [=](const at::Tensor& grad) -> std::vector<at::Tensor> {
    const at::Tensor normed = at::mul(input.to(wide), rstd);
    if (gradients->wants(*scale)) gradients->add_rows(*scale, grad.to(wide) * normed);
    const at::Tensor g = at::mul(grad, factor).to(wide);
    const at::Tensor along = at::mul(g, normed).mean(-1, /*keepdim=*/true);
    return {at::addcmul(g, normed, along, -1).mul_(rstd).to(input.scalar_type())};
  });
}

at::Tensor SegmentExecution::swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor g = gate.detach(), u = up.detach();
  return differentiable(at::silu(g).mul_(u), {gate, up}, [=](const at::Tensor& grad) -> std::vector<at::Tensor> {
    return {at::silu_backward(at::mul(grad, u), g), at::silu(g).mul_(grad)};
  });
}

namespace {

// Both halves of the table are equal, so the rotation's transpose is the rotation by minus the angle.
at::Tensor rotated(const at::Tensor& x_Shd, const RotaryTable& table, bool backwards) {
  const int64_t r = table.cos_Sr.size(-1), half = r / 2;
  const at::Tensor cos = table.cos_Sr.narrow(-1, 0, half).unsqueeze(1), sin = table.sin_Sr.narrow(-1, 0, half).unsqueeze(1);
  const double sign = backwards ? -1.0 : 1.0;
  const at::Tensor first = x_Shd.narrow(-1, 0, half), second = x_Shd.narrow(-1, half, half);
  at::Tensor y = at::empty(x_Shd.sizes(), x_Shd.options());
  at::Tensor y_first = y.narrow(-1, 0, half), y_second = y.narrow(-1, half, half);
  at::mul_out(y_first, first, cos);
  y_first.addcmul_(second, sin, -sign);
  at::mul_out(y_second, second, cos);
  y_second.addcmul_(first, sin, sign);
  if (r < x_Shd.size(-1)) y.narrow(-1, r, x_Shd.size(-1) - r).copy_(x_Shd.narrow(-1, r, x_Shd.size(-1) - r));
  return y;
}

}  // namespace

at::Tensor SegmentExecution::rotate(const at::Tensor& x_Shd, const RotaryTable& table) {
  return differentiable(rotated(x_Shd.detach(), table, false), {x_Shd},
                        [table](const at::Tensor& grad) -> std::vector<at::Tensor> { return {rotated(grad, table, true)}; });
}

at::Tensor SegmentExecution::attention(const AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                                       const at::Tensor& value_SGd) {
  keep_keys_values(spec, key_SGd, value_SGd);
  return prefix_attention(spec, query_SHd, key_SGd, value_SGd, options_.spans, options_.past);
}

void SegmentExecution::keep_keys_values(const AttentionSpec& spec, const at::Tensor& key_SGd, const at::Tensor& value_SGd) {
  keep_rows(spec.slot, 0, key_SGd);
  keep_rows(spec.slot, 1, value_SGd);
}

void SegmentExecution::keep_rows(int64_t slot, int64_t part, const at::Tensor& rows_Shw) {
  if (options_.state_use == StateUse::kLeave) return;
  PromptState& state = *options_.past.state;
  const int64_t begin = options_.past.tokens;
  if (options_.state_use == StateUse::kWrite) {
    state.write_rows(slot, part, begin, rows_Shw);
  } else if (!state.holds_rows(slot, part, begin, rows_Shw)) {
    ++mismatches_;
  }
  if (rows_Shw.requires_grad()) own_state_.push_back({.carried = false, .slot = slot, .part = part, .value = rows_Shw});
}

void SegmentExecution::keep_carried(int64_t slot, int64_t part, const at::Tensor& value) {
  PromptState& state = *options_.past.state;
  const int64_t end = options_.past.tokens + options_.spans.front().end;
  if (options_.state_use == StateUse::kWrite) {
    state.write_carried(slot, part, end, value);
  } else if (!state.holds_carried(slot, part, end, value)) {
    ++mismatches_;
  }
  if (value.requires_grad()) own_state_.push_back({.carried = true, .slot = slot, .part = part, .value = value});
}

at::Tensor SegmentExecution::choose_experts(int64_t router, const at::Tensor& scores_SE, int64_t k) {
  const at::NoGradGuard no_grad;
  // A stable sort, because topk promises no order among equal scores.
  const at::Tensor order_SE = std::get<1>(at::sort(scores_SE.detach(), /*stable=*/true, /*dim=*/-1, /*descending=*/true));
  const at::Tensor chosen_Sk = order_SE.narrow(-1, 0, k).contiguous();
  PromptState& state = *options_.past.state;
  if (options_.state_use == StateUse::kWrite) state.write_routes(router, options_.past.tokens, chosen_Sk);
  if (options_.state_use != StateUse::kVerify) return chosen_Sk;
  const at::Tensor captured_Sk = state.routes(router, options_.past.tokens, chosen_Sk.size(0));
  if (!captured_Sk.defined()) return chosen_Sk;
  if (!at::equal(captured_Sk, chosen_Sk)) ++changed_choices_;
  return captured_Sk;
}

at::Tensor SegmentExecution::experts(const at::Tensor& x_SD, const at::Tensor& chosen_Sk, const at::Tensor& weights_Sk,
                                     const core::model::ExpertWeights& experts) {
  // The products of gate and up are multiplied again in the backward pass: they are most of what a segment would keep.
  ExpertsForward made = grouped_experts_forward(x_SD.detach(), chosen_Sk, weights_Sk.detach(), experts, /*keep_products=*/false);
  GradientStore* gradients = options_.gradients;
  const core::model::ExpertWeights* weights = &experts;
  const auto backward = [=, saved = std::move(made.saved)](const at::Tensor& grad) -> std::vector<at::Tensor> {
    const auto gradient_of = [&](const Parameter& parameter) {
      return gradients->wants(parameter) ? gradients->of(parameter) : at::Tensor();
    };
    const ExpertsGradients g = grouped_experts_backward(grad, saved, *weights, gradient_of);
    return {g.x_SD, g.weights_Sk};
  };
  return differentiable(made.out_SD, {x_SD, weights_Sk}, backward);
}

}  // namespace longstraw
