#pragma once
// One differentiable operation given by its forward results and a function for its backward. LongStraw writes its own
// backward passes because it adds weight gradients and adjoints in place into buffers that autograd does not know.

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace longstraw {

// Gradients of the inputs, in their order; an undefined tensor where an input needs none.
using Backward = std::function<std::vector<at::Tensor>(const at::Tensor& grad_output)>;
// The same for several outputs: the gradient of an output that nothing depends on is undefined, never all of them.
using BackwardOfMany = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& grad_outputs)>;

// Makes `output` (computed without autograd) depend on `inputs`. With gradients disabled, or when no input needs one,
// `output` comes back as it is. `backward` runs at most once and what it holds is freed right after. It must hold
// detached tensors only, and its own output only as detach().
at::Tensor differentiable(at::Tensor output, const std::vector<at::Tensor>& inputs, Backward backward);
std::vector<at::Tensor> differentiable(std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs,
                                       BackwardOfMany backward);

}  // namespace longstraw
