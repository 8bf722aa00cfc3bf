#include "core/model/blocks/experts.h"

#include "core/device/device.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <limits>

namespace longstraw::core::model {

namespace {

// Parameters of every expert, in its own tensors or as parts of fused ones.
ExpertWeights declare_experts(Builder& builder, const std::string& prefix, const ExpertsSpec& spec) {
  const ExpertsShape& shape = spec.shape;
  const int64_t inputs = shape.latent > 0 ? shape.latent : spec.hidden;
  ExpertWeights experts{.activation = shape.activation};
  if (!spec.names.fused_input.empty()) {
    const Parameter* in =
        builder.parameter(prefix + spec.names.fused_input, {shape.experts, (shape.gated ? 2 : 1) * shape.width, inputs});
    const Parameter* out = builder.parameter(prefix + spec.names.fused_output, {shape.experts, inputs, shape.width});
    for (int64_t e = 0; e < shape.experts; ++e) {
      if (shape.gated) experts.gate.push_back({.parameter = in, .expert = e, .row = 0, .rows = shape.width});
      experts.up.push_back({.parameter = in, .expert = e, .row = shape.gated ? shape.width : 0, .rows = shape.width});
      experts.down.push_back({.parameter = out, .expert = e});
    }
    return experts;
  }
  for (int64_t e = 0; e < shape.experts; ++e) {
    const std::string one = fmt::format("{}{}{}.", prefix, spec.names.each, e);
    if (shape.gated) experts.gate.push_back({.parameter = builder.parameter(one + "gate_proj.weight", {shape.width, inputs})});
    experts.up.push_back({.parameter = builder.parameter(one + "up_proj.weight", {shape.width, inputs})});
    experts.down.push_back({.parameter = builder.parameter(one + "down_proj.weight", {inputs, shape.width})});
  }
  return experts;
}

}  // namespace

ExpertsBlock::ExpertsBlock(Builder& builder, const std::string& prefix, const ExpertsSpec& spec)
    : shape_(spec.shape), routing_(spec.routing) {
  const ExpertNames& names = spec.names;
  router_ = builder.router({.layer = spec.layer, .experts = shape_.experts, .chosen = shape_.chosen});
  router_weight_ED_ = builder.parameter(prefix + names.router, {shape_.experts, spec.hidden});
  correction_E_ = routing_.correction ? builder.constant(prefix + names.correction, {shape_.experts}) : nullptr;
  const auto latent = [&](const std::string& name, int64_t out, int64_t in) {
    const Parameter* weight = builder.parameter_if(shape_.latent > 0, prefix + name + "weight", {out, in});
    return Affine{weight, builder.parameter_if(shape_.latent > 0 && spec.bias, prefix + name + "bias", {out})};
  };
  latent_input_ = latent(names.latent_input, shape_.latent, spec.hidden);
  experts_ = declare_experts(builder, prefix, spec);
  latent_output_ = latent(names.latent_output, spec.hidden, shape_.latent);
  if (shape_.shared_width > 0) {
    shared_ = std::make_unique<MlpBlock>(
        builder, prefix + names.shared, spec.hidden,
        MlpShape{.width = shape_.shared_width, .activation = shape_.activation, .gated = shape_.gated, .bias = spec.bias});
  }
  shared_gate_1D_ =
      builder.parameter_if(shared_ != nullptr && !names.shared_gate.empty(), prefix + names.shared_gate, {1, spec.hidden});
}

at::Tensor ExpertsBlock::Affine::operator()(const at::Tensor& x, Execution& execution) const {
  return weight != nullptr ? execution.linear(x, *weight, bias) : x;
}

at::Tensor ExpertsBlock::choice_scores(const at::Tensor& scores_SE, Execution& execution) const {
  at::Tensor choice_SE = scores_SE.detach();
  if (correction_E_ != nullptr) choice_SE = choice_SE + execution.value(*correction_E_).detach();
  if (routing_.chosen_groups >= routing_.groups) return choice_SE;
  const at::Tensor grouped_SGe = choice_SE.unflatten(-1, {routing_.groups, -1});
  const at::Tensor best_two_SG = std::get<0>(grouped_SGe.topk(2, -1)).sum(-1);
  // A stable order, so that of equal groups the first is chosen, whenever and wherever this is computed.
  const at::Tensor ranked_SG = at::argsort(best_two_SG, /*stable=*/true, /*dim=*/-1, /*descending=*/true);
  const at::Tensor excluded_SG =
      at::ones_like(best_two_SG, at::kBool).scatter(-1, ranked_SG.narrow(-1, 0, routing_.chosen_groups), /*value=*/false);
  return grouped_SGe.masked_fill(excluded_SG.unsqueeze(-1), -std::numeric_limits<double>::infinity()).flatten(1);
}

ExpertsBlock::Route ExpertsBlock::route(const at::Tensor& x_SD, Execution& execution) const {
  const at::ScalarType wide = device::accumulation_dtype(x_SD.scalar_type());
  const at::Tensor logits_SE = routing_.wide ? at::linear(x_SD.to(wide), execution.value(*router_weight_ED_).to(wide))
                                             : execution.linear(x_SD, *router_weight_ED_, nullptr).to(wide);
  at::Tensor scores_SE = logits_SE;
  if (routing_.scores == Routing::Scores::kSoftmax) scores_SE = at::softmax(logits_SE, -1);
  if (routing_.scores == Routing::Scores::kSigmoid) scores_SE = at::sigmoid(logits_SE);

  const at::Tensor chosen_Sk = execution.choose_experts(router_, choice_scores(scores_SE, execution), shape_.chosen);
  at::Tensor weights_Sk = scores_SE.gather(-1, chosen_Sk);
  if (routing_.scores == Routing::Scores::kSoftmaxOfChosen) weights_Sk = at::softmax(weights_Sk, -1);
  if (routing_.normalised) weights_Sk = weights_Sk / (weights_Sk.sum(-1, /*keepdim=*/true) + routing_.sum_guard);
  if (routing_.scale != 1.0) weights_Sk = weights_Sk * routing_.scale;
  return {chosen_Sk, routing_.wide ? weights_Sk : weights_Sk.to(x_SD.scalar_type())};
}

at::Tensor ExpertsBlock::shared_output(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const {
  const at::Tensor shared_SD = shared_->output(x_SD, where, execution);
  if (shared_gate_1D_ == nullptr) return shared_SD;
  return at::sigmoid(execution.linear(x_SD, *shared_gate_1D_, nullptr)) * shared_SD;
}

at::Tensor ExpertsBlock::output(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const {
  const Route routed = route(x_SD, execution);
  const at::Tensor routed_SD =
      latent_output_(execution.experts(latent_input_(x_SD, execution), routed.chosen_Sk, routed.weights_Sk, experts_), execution);
  return shared_ != nullptr ? routed_SD + shared_output(x_SD, where, execution) : routed_SD;
}

}  // namespace longstraw::core::model
