#include "longstraw/autograd_node.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace longstraw {
namespace {

class BackwardNode final : public torch::autograd::Node {
 public:
  explicit BackwardNode(Backward backward) : backward_(std::move(backward)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    TORCH_CHECK(backward_, "a LongStraw operation was run backward twice");
    const Backward backward = std::exchange(backward_, nullptr);
    if (!grads[0].defined()) return torch::autograd::variable_list(num_outputs());
    at::NoGradGuard no_grad;
    return backward(grads[0]);
  }

  void release_variables() override { backward_ = nullptr; }

 private:
  Backward backward_;
};

}  // namespace

at::Tensor differentiable(at::Tensor output, const std::vector<at::Tensor>& inputs, Backward backward) {
  if (!torch::autograd::compute_requires_grad(inputs)) return output;
  {
    // A view would carry its base's history: take the same memory as a tensor of its own.
    at::AutoDispatchBelowADInplaceOrView no_view_tracking;
    output = at::alias(output);
  }
  auto node = std::shared_ptr<BackwardNode>(new BackwardNode(std::move(backward)), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  torch::autograd::set_history(output, node);
  return output;
}

}  // namespace longstraw
