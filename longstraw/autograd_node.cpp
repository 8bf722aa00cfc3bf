#include "longstraw/autograd_node.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>

namespace longstraw {
namespace {

class BackwardNode final : public torch::autograd::Node {
 public:
  explicit BackwardNode(BackwardOfMany backward) : backward_(std::move(backward)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    TORCH_CHECK(backward_, "a LongStraw operation was run backward twice");
    const BackwardOfMany backward = std::exchange(backward_, nullptr);
    if (std::none_of(grads.begin(), grads.end(), [](const at::Tensor& grad) { return grad.defined(); })) {
      return torch::autograd::variable_list(num_outputs());
    }
    at::NoGradGuard no_grad;
    return backward(grads);
  }

  void release_variables() override { backward_ = nullptr; }

 private:
  BackwardOfMany backward_;
};

}  // namespace

std::vector<at::Tensor> differentiable(std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs,
                                       BackwardOfMany backward) {
  if (!torch::autograd::compute_requires_grad(inputs)) return outputs;
  auto node = std::shared_ptr<BackwardNode>(new BackwardNode(std::move(backward)), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  for (at::Tensor& output : outputs) {
    {
      // A view would carry its base's history: take the same memory as a tensor of its own.
      at::AutoDispatchBelowADInplaceOrView no_view_tracking;
      output = at::alias(output);
    }
    torch::autograd::set_history(output, node);
  }
  return outputs;
}

at::Tensor differentiable(at::Tensor output, const std::vector<at::Tensor>& inputs, Backward backward) {
  return differentiable(std::vector<at::Tensor>{std::move(output)}, inputs,
                        [backward = std::move(backward)](const std::vector<at::Tensor>& grads) { return backward(grads[0]); })
      .front();
}

}  // namespace longstraw
