// Routed experts, one after the other, each over the tokens that chose it.
#include "reference/textbook.h"
#include "reference/whole_sequence.h"

#include <ATen/ATen.h>

namespace longstraw::reference {

using core::model::Activation;
using core::model::ExpertWeight;

namespace {

at::Tensor activate(Activation activation, const at::Tensor& x) {
  switch (activation) {
    case Activation::kSilu: return at::silu(x);
    case Activation::kRelu2: return at::relu(x).square();
  }
  TORCH_INTERNAL_ASSERT(false, "unknown activation");
}

}  // namespace

at::Tensor WholeSequence::choose_experts(int64_t, const at::Tensor& scores_SE, int64_t k) { return largest(scores_SE, k); }

at::Tensor WholeSequence::experts(const at::Tensor& x_SD, const at::Tensor& chosen_Sk, const at::Tensor& weights_Sk,
                                  const core::model::ExpertWeights& experts) {
  const auto apply = [&](const ExpertWeight& weight, const at::Tensor& x) {
    return at::linear(x, weight.of(value(*weight.parameter)));
  };
  at::Tensor sum_SD = at::zeros_like(x_SD);
  for (size_t e = 0; e < experts.down.size(); ++e) {
    // Each of the n pairs (token, place among its k) that name this expert.
    const at::Tensor pairs_n2 = (chosen_Sk == int64_t(e)).nonzero();
    if (pairs_n2.size(0) == 0) continue;
    const at::Tensor token_n = pairs_n2.select(1, 0), place_n = pairs_n2.select(1, 1);
    const at::Tensor x_nD = x_SD.index_select(0, token_n);
    const at::Tensor up_nI = apply(experts.up[e], x_nD);
    const at::Tensor inner_nI = experts.gate.empty() ? activate(experts.activation, up_nI)
                                                     : activate(experts.activation, apply(experts.gate[e], x_nD)) * up_nI;
    const at::Tensor weight_n1 = weights_Sk.index({token_n, place_n}).unsqueeze(1);
    // Weighted in the dtype of the weights (wide in some families), then summed in that of the model, as Hugging Face does.
    const at::Tensor out_nD = apply(experts.down[e], inner_nI) * weight_n1;
    sum_SD = sum_SD.index_add(0, token_n, out_nD.to(x_SD.scalar_type()));
  }
  return sum_SD;
}

}  // namespace longstraw::reference
