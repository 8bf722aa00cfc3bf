#include "longstraw/grouped_experts.h"

#include "core/base/errors.h"
#include "core/device/device.h"

#include <ATen/ATen.h>

#include <string>

namespace longstraw {
namespace {

using core::device::accumulation_dtype;
using core::model::Activation;
using core::model::ExpertWeight;
using core::model::ExpertWeights;

[[noreturn]] void fail(const std::string& what) { throw ConfigError("experts: " + what); }

void check(const at::Tensor& x_SD, const at::Tensor& chosen_Sk, const at::Tensor& weights_Sk, const ExpertWeights& experts) {
  if (x_SD.dim() != 2) fail("x: shape " + c10::str(x_SD.sizes()) + ", wanted [S, D]");
  if (chosen_Sk.dim() != 2 || chosen_Sk.size(0) != x_SD.size(0) || chosen_Sk.sizes() != weights_Sk.sizes()) {
    fail("of " + std::to_string(x_SD.size(0)) + " tokens, chosen " + c10::str(chosen_Sk.sizes()) + ", weights " +
         c10::str(weights_Sk.sizes()) + ", wanted [S, k] twice");
  }
  if (chosen_Sk.scalar_type() != at::kLong)
    fail(std::string("chosen are ") + c10::toString(chosen_Sk.scalar_type()) + ", wanted int64");
  const size_t count = experts.up.size();
  if (experts.down.size() != count || (!experts.gate.empty() && experts.gate.size() != count)) {
    fail(std::to_string(count) + " up projections, " + std::to_string(experts.down.size()) + " down, " +
         std::to_string(experts.gate.size()) + " gates");
  }
}

ExpertOrder make_order(const at::Tensor& chosen_Sk, size_t experts) {
  const at::Tensor chosen_N = chosen_Sk.reshape({-1});
  ExpertOrder order;
  order.counts.assign(experts, 0);
  if (chosen_N.numel() == 0) {
    order.slot_N = chosen_N;
    return order;
  }
  // On the host: the sizes of the products are needed there, and a sort of a few thousand numbers is nothing.
  const at::Tensor host = chosen_N.to(at::kCPU).contiguous();
  const int64_t* const chosen = host.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < host.numel(); ++i) {
    if (chosen[i] < 0 || chosen[i] >= static_cast<int64_t>(experts)) {
      fail("token " + std::to_string(i / chosen_Sk.size(1)) + " chose expert " + std::to_string(chosen[i]) + " of " +
           std::to_string(experts));
    }
    ++order.counts[static_cast<size_t>(chosen[i])];
  }
  std::vector<int64_t> next(experts, 0);
  for (size_t e = 1; e < experts; ++e) next[e] = next[e - 1] + order.counts[e - 1];
  at::Tensor slot = at::empty({host.numel()}, at::kLong);
  int64_t* const to = slot.data_ptr<int64_t>();
  for (int64_t i = 0; i < host.numel(); ++i) to[next[static_cast<size_t>(chosen[i])]++] = i;
  order.slot_N = slot.to(chosen_Sk.device());
  return order;
}

// The part of the sorted order that is one expert's.
struct Rows {
  size_t expert = 0;
  int64_t begin = 0, count = 0;
  at::Tensor slot_n, token_n;  // pairs t · k + j, and t

  at::Tensor of(const at::Tensor& sorted) const { return sorted.narrow(0, begin, count); }
};

template <class Work>
void for_each_expert(const ExpertOrder& order, int64_t k, Work work) {
  int64_t begin = 0;
  for (size_t expert = 0; expert < order.counts.size(); ++expert) {
    const int64_t count = order.counts[expert];
    if (count == 0) continue;
    const at::Tensor slot_n = order.slot_N.narrow(0, begin, count);
    work(Rows{expert, begin, count, slot_n, slot_n.div(k, "floor")});
    begin += count;
  }
}

at::Tensor weight(const ExpertWeight& part) { return part.of(part.parameter->value.detach()); }

struct Products {
  at::Tensor gate_nI;  // undefined without a gate
  at::Tensor up_nI;
};

Products multiply(const ExpertWeights& experts, size_t expert, const at::Tensor& x_nD) {
  Products products;
  if (!experts.gate.empty()) products.gate_nI = at::mm(x_nD, weight(experts.gate[expert]).t());
  products.up_nI = at::mm(x_nD, weight(experts.up[expert]).t());
  return products;
}

at::Tensor activate(Activation activation, const at::Tensor& x) {
  return activation == Activation::kSilu ? at::silu(x) : at::relu(x).square_();
}

at::Tensor activate_backward(Activation activation, const at::Tensor& grad, const at::Tensor& x) {
  return activation == Activation::kSilu ? at::silu_backward(grad, x) : at::relu(x).mul_(2.0).mul_(grad);
}

at::Tensor inner_of(Activation activation, const Products& products) {
  if (!products.gate_nI.defined()) return activate(activation, products.up_nI);
  return activate(activation, products.gate_nI).mul_(products.up_nI);
}

// Gradients of the products, given that of the inner activation.
Products products_backward(Activation activation, const Products& products, const at::Tensor& grad_inner) {
  if (!products.gate_nI.defined()) return {{}, activate_backward(activation, grad_inner, products.up_nI)};
  return {activate_backward(activation, at::mul(grad_inner, products.up_nI), products.gate_nI),
          activate(activation, products.gate_nI).mul_(grad_inner)};
}

// += gradᵀ x, into the part of the parameter's accumulator that is this expert's.
void add_outer(const GradientOf& gradient_of, const ExpertWeight& part, const at::Tensor& grad_nO, const at::Tensor& x_nI) {
  const at::Tensor whole = gradient_of(*part.parameter);
  if (!whole.defined()) return;
  at::Tensor sum = part.of(whole);
  if (sum.scalar_type() == grad_nO.scalar_type()) {
    sum.addmm_(grad_nO.t(), x_nI);
  } else {
    sum.add_(at::mm(grad_nO.t(), x_nI));
  }
}

// x times each row's weight, rounded once.
at::Tensor weighted(const at::Tensor& x_nI, const at::Tensor& weight_n1) { return at::mul(x_nI, weight_n1).to(x_nI.scalar_type()); }

// Gradients that one expert's rows make: of its weights, of the weights of its pairs, and of its rows of x, which come back.
at::Tensor expert_backward(const at::Tensor& grad_nD, const ExpertsSaved& saved, const ExpertWeights& experts,
                           const GradientOf& gradient_of, const Rows& rows, const at::Tensor& weight_n1,
                           at::Tensor& grad_weights_N) {
  const at::Tensor x_nD = saved.x_SD.index_select(0, rows.token_n);
  Products products;
  if (saved.up_NI.defined()) {
    products.up_nI = rows.of(saved.up_NI);
    if (saved.gate_NI.defined()) products.gate_nI = rows.of(saved.gate_NI);
  } else {
    products = multiply(experts, rows.expert, x_nD);
  }
  const at::Tensor inner_nI = inner_of(experts.activation, products);
  const at::Tensor back_nI = at::mm(grad_nD, weight(experts.down[rows.expert]));
  grad_weights_N.index_copy_(0, rows.slot_n, (back_nI.to(weight_n1.scalar_type()) * inner_nI).sum(1));
  add_outer(gradient_of, experts.down[rows.expert], grad_nD, weighted(inner_nI, weight_n1));
  const Products grads = products_backward(experts.activation, products, weighted(back_nI, weight_n1));
  at::Tensor grad_x_nD = at::mm(grads.up_nI, weight(experts.up[rows.expert]));
  add_outer(gradient_of, experts.up[rows.expert], grads.up_nI, x_nD);
  if (grads.gate_nI.defined()) {
    grad_x_nD.addmm_(grads.gate_nI, weight(experts.gate[rows.expert]));
    add_outer(gradient_of, experts.gate[rows.expert], grads.gate_nI, x_nD);
  }
  return grad_x_nD;
}

}  // namespace

ExpertsForward grouped_experts_forward(const at::Tensor& x_SD, const at::Tensor& chosen_Sk, const at::Tensor& weights_Sk,
                                       const ExpertWeights& experts, bool keep_products) {
  check(x_SD, chosen_Sk, weights_Sk, experts);
  const at::NoGradGuard no_grad;
  ExpertsForward result;
  result.saved = {x_SD.detach(), weights_Sk.detach(), make_order(chosen_Sk, experts.up.size()), {}, {}};
  ExpertsSaved& saved = result.saved;
  const auto wide = accumulation_dtype(x_SD.scalar_type());
  const int64_t k = chosen_Sk.size(1);
  if (keep_products && chosen_Sk.numel() > 0) {
    const int64_t inner = weight(experts.up[0]).size(0);
    saved.up_NI = at::empty({chosen_Sk.numel(), inner}, saved.x_SD.options());
    if (!experts.gate.empty()) saved.gate_NI = at::empty_like(saved.up_NI);
  }
  const at::Tensor weight_N1 = saved.weights_Sk.to(wide).reshape({-1, 1});
  at::Tensor sum_SD = at::zeros(x_SD.sizes(), saved.x_SD.options().dtype(wide));
  for_each_expert(saved.order, k, [&](const Rows& rows) {
    const Products products = multiply(experts, rows.expert, saved.x_SD.index_select(0, rows.token_n));
    const at::Tensor out_nD = at::mm(inner_of(experts.activation, products), weight(experts.down[rows.expert]).t());
    // An expert has a token at most once, so that one call adds each row of the sum once: no order to depend on.
    sum_SD.index_add_(0, rows.token_n, out_nD.to(wide).mul_(weight_N1.index_select(0, rows.slot_n)));
    if (saved.up_NI.defined()) rows.of(saved.up_NI).copy_(products.up_nI);
    if (saved.gate_NI.defined()) rows.of(saved.gate_NI).copy_(products.gate_nI);
  });
  result.out_SD = sum_SD.to(x_SD.scalar_type());
  return result;
}

ExpertsGradients grouped_experts_backward(const at::Tensor& grad_SD, const ExpertsSaved& saved, const ExpertWeights& experts,
                                          const GradientOf& gradient_of) {
  if (grad_SD.sizes() != saved.x_SD.sizes())
    fail("gradient: shape " + c10::str(grad_SD.sizes()) + ", wanted " + c10::str(saved.x_SD.sizes()));
  const at::NoGradGuard no_grad;
  const auto wide = accumulation_dtype(saved.x_SD.scalar_type());
  const at::Tensor weight_N1 = saved.weights_Sk.to(wide).reshape({-1, 1});
  at::Tensor grad_x_SD = at::zeros(saved.x_SD.sizes(), saved.x_SD.options().dtype(wide));
  at::Tensor grad_weights_N = at::zeros({weight_N1.size(0)}, weight_N1.options());
  for_each_expert(saved.order, saved.weights_Sk.size(1), [&](const Rows& rows) {
    const at::Tensor grad_x_nD = expert_backward(grad_SD.index_select(0, rows.token_n), saved, experts, gradient_of, rows,
                                                 weight_N1.index_select(0, rows.slot_n), grad_weights_N);
    grad_x_SD.index_add_(0, rows.token_n, grad_x_nD.to(wide));
  });
  return {grad_x_SD.to(saved.x_SD.scalar_type()), grad_weights_N.view(saved.weights_Sk.sizes()).to(saved.weights_Sk.scalar_type())};
}

int64_t expert_product_bytes(int64_t pairs, int64_t inner, bool gated, c10::ScalarType dtype) {
  return pairs * inner * (gated ? 2 : 1) * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace longstraw
