#include "core/model/blocks/mlp.h"

#include <ATen/ATen.h>

namespace longstraw::core::model {

MlpBlock::MlpBlock(Builder& builder, const std::string& prefix, int64_t hidden, const MlpShape& shape) : shape_(shape) {
  const auto affine = [&](const char* name, int64_t out, int64_t in) {
    const Parameter* weight = builder.parameter(prefix + name + ".weight", {out, in});
    return Affine{weight, builder.parameter_if(shape.bias, prefix + name + ".bias", {out})};
  };
  if (shape.fused) {
    input_ = affine("input_linear", (shape.gated ? 2 : 1) * shape.width, hidden);
    down_ = affine("output_linear", hidden, shape.width);
    return;
  }
  if (shape.gated) gate_ = affine("gate_proj", shape.width, hidden);
  input_ = affine("up_proj", shape.width, hidden);
  down_ = affine("down_proj", hidden, shape.width);
}

at::Tensor MlpBlock::output(const at::Tensor& x_SD, const TokenPositions&, Execution& execution) const {
  const auto apply = [&](const Affine& affine, const at::Tensor& x) { return execution.linear(x, *affine.weight, affine.bias); };
  const at::Tensor input_SI = apply(input_, x_SD);  // up, or gate and up
  at::Tensor inner_SI;
  if (!shape_.gated) {
    inner_SI = shape_.activation == Activation::kRelu2 ? at::relu(input_SI).square() : at::silu(input_SI);
  } else if (shape_.fused) {
    const at::Tensor gate_SI = input_SI.narrow(-1, 0, shape_.width);
    inner_SI = execution.swiglu(scaled(gate_SI, shape_.gate_multiplier), input_SI.narrow(-1, shape_.width, shape_.width));
  } else {
    inner_SI = execution.swiglu(scaled(apply(gate_, x_SD), shape_.gate_multiplier), input_SI);
  }
  return scaled(apply(down_, inner_SI), shape_.output_multiplier);
}

}  // namespace longstraw::core::model
