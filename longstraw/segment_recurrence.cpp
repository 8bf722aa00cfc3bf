// Recurrent mixers of a segment (segment_execution.h): carried values come from the past's border and go to the segment's
// own; spans that are replayed together start from the same border.
#include "longstraw/autograd_node.h"
#include "longstraw/causal_convolution.h"
#include "longstraw/delta_rule.h"
#include "longstraw/segment_execution.h"
#include "longstraw/state_space.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace longstraw {
namespace {

using core::model::Parameter;

// The tokens run together as sequences of one batch, and the border that all of them start from.
class Sequences {
 public:
  Sequences(std::vector<Span> spans, Past past) : spans_(std::move(spans)), past_(past) {
    for (const Span& span : spans_) lengths_.push_back(span.end - span.begin);
  }
  const std::vector<int64_t>& lengths() const { return lengths_; }

  // Rows of all spans [S, ...] -> [N, T, ...], T the longest span; an undefined tensor stays undefined.
  at::Tensor side_by_side(const at::Tensor& x) const {
    if (!x.defined()) return x;
    if (spans_.size() == 1) return x.unsqueeze(0);
    std::vector<int64_t> shape = x.sizes().vec();
    shape.front() = *std::max_element(lengths_.begin(), lengths_.end());
    shape.insert(shape.begin(), static_cast<int64_t>(lengths_.size()));
    const at::Tensor padded = at::zeros(shape, x.options().requires_grad(false));
    for (size_t n = 0; n < lengths_.size(); ++n) {
      padded[static_cast<int64_t>(n)].narrow(0, 0, lengths_[n]).copy_(x.narrow(0, spans_[n].begin, lengths_[n]));
    }
    return padded;
  }
  at::Tensor one_after_another(const at::Tensor& x_NT) const {
    if (spans_.size() == 1) return x_NT.squeeze(0);
    std::vector<at::Tensor> rows;
    for (size_t n = 0; n < lengths_.size(); ++n) rows.push_back(x_NT[static_cast<int64_t>(n)].narrow(0, 0, lengths_[n]));
    return at::cat(rows, 0);
  }

  // The value at the border, [1, ...]: it serves all sequences.
  at::Tensor border(int64_t slot, int64_t part) const {
    const at::Tensor value = past_.state->carried(slot, part, past_.tokens);
    return value.defined() ? value.unsqueeze(0) : value;
  }
  void add_to_border(int64_t slot, int64_t part, const at::Tensor& grad_1) const {
    if (grad_1.defined() && past_.carries_gradient()) {
      past_.state->add_carried_adjoint(slot, part, past_.tokens, grad_1.squeeze(0));
    }
  }

 private:
  std::vector<Span> spans_;
  std::vector<int64_t> lengths_;
  Past past_;
};

// Gradients of an operation's outputs: that of its rows, side by side, and that of the end value, which only a segment of
// the prompt has.
struct OutputGradients {
  at::Tensor out_NT, end_N;
};
OutputGradients output_gradients(const Sequences& sequences, const std::vector<at::Tensor>& grads) {
  const bool has_end = grads.size() > 1 && grads[1].defined();
  return {sequences.side_by_side(grads[0]), has_end ? grads[1].unsqueeze(0) : at::Tensor()};
}

}  // namespace

at::Tensor SegmentExecution::keep_end(int64_t slot, int64_t part, std::vector<at::Tensor> outputs) {
  if (outputs.size() > 1) keep_carried(slot, part, outputs[1]);
  return outputs[0];
}

at::Tensor SegmentExecution::causal_convolution(int64_t slot, const at::Tensor& x_SC, const Parameter& weight_C1K,
                                                const Parameter* bias_C) {
  const Sequences sequences(options_.spans, options_.past);
  const ConvolutionInput input{.x_NTC = sequences.side_by_side(x_SC.detach()),
                               .window_NCk = sequences.border(slot, 0),
                               .weight_C1K = weight_C1K.value.detach(),
                               .bias_C = bias_C != nullptr ? bias_C->value.detach() : at::Tensor(),
                               .lengths = sequences.lengths()};
  const ConvolutionOutput made = causal_convolution_forward(input);
  std::vector<at::Tensor> outputs{sequences.one_after_another(made.out_NTC)};
  if (options_.state_use != StateUse::kLeave) outputs.push_back(made.end_window_NCk.squeeze(0));
  GradientStore* gradients = options_.gradients;
  const Parameter* weight = &weight_C1K;
  const auto backward = [=](const std::vector<at::Tensor>& grads) -> std::vector<at::Tensor> {
    const auto [out_NT, end_N] = output_gradients(sequences, grads);
    const ConvolutionGradients made_grads = causal_convolution_backward(input, out_NT, end_N);
    if (gradients->wants(*weight)) gradients->of(*weight).add_(made_grads.weight);
    if (bias_C != nullptr && gradients->wants(*bias_C)) gradients->of(*bias_C).add_(made_grads.bias);
    sequences.add_to_border(slot, 0, made_grads.window);
    return {sequences.one_after_another(made_grads.x)};
  };
  return keep_end(slot, 0, differentiable(std::move(outputs), {x_SC}, backward));
}

at::Tensor SegmentExecution::gated_delta_rule(int64_t slot, const at::Tensor& query_SGk, const at::Tensor& key_SGk,
                                              const at::Tensor& value_SHv, const at::Tensor& log_decay_SH,
                                              const at::Tensor& beta_SH) {
  const Sequences sequences(options_.spans, options_.past);
  const DeltaRuleInput input{.query_NTKd = sequences.side_by_side(query_SGk.detach()),
                             .key_NTKd = sequences.side_by_side(key_SGk.detach()),
                             .value_NTHv = sequences.side_by_side(value_SHv.detach()),
                             .log_decay_NTH = sequences.side_by_side(log_decay_SH.detach()),
                             .beta_NTH = sequences.side_by_side(beta_SH.detach()),
                             .state_NHkv = sequences.border(slot, 1),
                             .lengths = sequences.lengths()};
  const std::vector<at::Tensor> inputs{query_SGk, key_SGk, value_SHv, log_decay_SH, beta_SH};
  const DeltaRuleOutput saved = delta_rule_forward(input, kRecurrentChunk, at::GradMode::is_enabled());
  std::vector<at::Tensor> outputs{sequences.one_after_another(saved.out_NTHv)};
  if (options_.state_use != StateUse::kLeave) outputs.push_back(saved.end_state_NHkv.squeeze(0));
  const at::Tensor chunk_states = saved.chunk_states;
  const auto backward = [=](const std::vector<at::Tensor>& grads) -> std::vector<at::Tensor> {
    const auto [out_NT, end_N] = output_gradients(sequences, grads);
    const DeltaRuleOutput kept{.out_NTHv = {}, .end_state_NHkv = {}, .chunk_states = chunk_states};
    const DeltaRuleGradients g = delta_rule_backward(input, kept, out_NT, end_N, kRecurrentChunk);
    sequences.add_to_border(slot, 1, g.state);
    std::vector<at::Tensor> made{g.query, g.key, g.value, g.log_decay, g.beta};
    for (at::Tensor& grad : made) grad = sequences.one_after_another(grad);
    return made;
  };
  return keep_end(slot, 1, differentiable(std::move(outputs), inputs, backward));
}

at::Tensor SegmentExecution::state_space(int64_t slot, const at::Tensor& x_SHp, const at::Tensor& dt_SH, const at::Tensor& a_H,
                                         const at::Tensor& b_SGn, const at::Tensor& c_SGn) {
  const Sequences sequences(options_.spans, options_.past);
  const StateSpaceInput input{.x_NTHp = sequences.side_by_side(x_SHp.detach()),
                              .dt_NTH = sequences.side_by_side(dt_SH.detach()),
                              .a_H = a_H.detach(),
                              .b_NTGn = sequences.side_by_side(b_SGn.detach()),
                              .c_NTGn = sequences.side_by_side(c_SGn.detach()),
                              .state_NHpn = sequences.border(slot, 1),
                              .lengths = sequences.lengths()};
  const StateSpaceOutput saved = state_space_forward(input, kRecurrentChunk, at::GradMode::is_enabled());
  std::vector<at::Tensor> outputs{sequences.one_after_another(saved.out_NTHp)};
  if (options_.state_use != StateUse::kLeave) outputs.push_back(saved.end_state_NHpn.squeeze(0));
  const at::Tensor chunk_states = saved.chunk_states;
  const auto backward = [=](const std::vector<at::Tensor>& grads) -> std::vector<at::Tensor> {
    const auto [out_NT, end_N] = output_gradients(sequences, grads);
    const StateSpaceOutput kept{.out_NTHp = {}, .end_state_NHpn = {}, .chunk_states = chunk_states};
    const StateSpaceGradients g = state_space_backward(input, kept, out_NT, end_N, kRecurrentChunk);
    sequences.add_to_border(slot, 1, g.state);
    return {sequences.one_after_another(g.x), sequences.one_after_another(g.dt), g.a, sequences.one_after_another(g.b),
            sequences.one_after_another(g.c)};
  };
  return keep_end(slot, 1, differentiable(std::move(outputs), {x_SHp, dt_SH, a_H, b_SGn, c_SGn}, backward));
}

}  // namespace longstraw
