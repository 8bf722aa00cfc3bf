#include "longstraw/gradient_store.h"

#include "core/device/device.h"

#include <ATen/ATen.h>

namespace longstraw {

GradientStore::GradientStore(const core::model::Decoder& decoder) {
  const auto dtype = core::device::accumulation_dtype(decoder.dtype());
  for (const auto& parameter : decoder.parameters()) {
    index_[parameter.get()] = gradients_.size();
    gradients_.push_back(at::zeros(parameter->value.sizes(), parameter->value.options().dtype(dtype).requires_grad(false)));
  }
}

at::Tensor& GradientStore::of(const core::model::Parameter& parameter) {
  if (passed_on_to_ != nullptr) return passed_on_to_->of(parameter);
  return gradients_[index_.at(&parameter)];
}

void GradientStore::add_outer(const core::model::Parameter& weight_OI, const at::Tensor& grad_SO, const at::Tensor& x_SI) {
  at::Tensor& sum = of(weight_OI);
  if (sum.scalar_type() == grad_SO.scalar_type()) {
    sum.addmm_(grad_SO.t(), x_SI);
  } else {
    sum.add_(at::mm(grad_SO.t(), x_SI));
  }
}

void GradientStore::add_rows(const core::model::Parameter& vector_O, const at::Tensor& grad_SO) {
  at::Tensor& sum = of(vector_O);
  sum.add_(grad_SO.reshape({-1, sum.size(0)}).sum(0, /*keepdim=*/false, sum.scalar_type()));
}

}  // namespace longstraw
