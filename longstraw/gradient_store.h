#pragma once
// Accumulators of the parameters' gradients: float32, or float64 in a float64 run, never the weights' own bfloat16.
// Operations add into them in place, in the order in which they run backward, which is fixed.

#include "core/model/decoder.h"

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <vector>

namespace longstraw {

class GradientStore {
 public:
  // Zeros in the shape of every parameter of `decoder`, on its device.
  explicit GradientStore(const core::model::Decoder& decoder);
  // Of graphs that are made before there is a store: what they add, when they run backward, goes to the one set by then.
  GradientStore() = default;
  void pass_on_to(GradientStore* store) { passed_on_to_ = store; }

  bool wants(const core::model::Parameter& parameter) const { return parameter.value.requires_grad(); }
  // The accumulator of `parameter`, in the parameter's shape; only of Decoder::parameters(), those that are trained.
  at::Tensor& of(const core::model::Parameter& parameter);

  // += gradᵀ x: the gradient of a weight [O, I] with y = x Wᵀ; grad [S, O], x [S, I].
  void add_outer(const core::model::Parameter& weight_OI, const at::Tensor& grad_SO, const at::Tensor& x_SI);
  // += grad, summed over all but the last dimension.
  void add_rows(const core::model::Parameter& vector_O, const at::Tensor& grad_SO);

  // Parallel to Decoder::parameters(); the store is empty afterwards.
  std::vector<at::Tensor> release() { return std::move(gradients_); }

 private:
  GradientStore* passed_on_to_ = nullptr;
  std::vector<at::Tensor> gradients_;
  std::unordered_map<const core::model::Parameter*, size_t> index_;
};

}  // namespace longstraw
