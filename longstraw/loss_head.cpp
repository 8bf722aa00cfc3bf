#include "longstraw/loss_head.h"

#include "core/device/device.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace longstraw {
namespace {

constexpr int64_t kSliceBytes = int64_t{64} << 20;

std::vector<double> to_doubles(const at::Tensor& values) {
  const at::Tensor host = values.to(at::kCPU, at::kDouble).contiguous();
  return {host.const_data_ptr<double>(), host.const_data_ptr<double>() + host.numel()};
}

}  // namespace

int64_t logit_rows(int64_t vocab_size) {
  return std::max<int64_t>(16, kSliceBytes / (static_cast<int64_t>(sizeof(float)) * vocab_size));
}

at::Tensor loss_head(const core::model::Decoder& decoder, const at::Tensor& hidden_SD, const at::Tensor& targets_S,
                     const LossHeadOptions& options, const LossOfRows& loss, GradientStore* gradients) {
  const double temperature = options.temperature;
  at::NoGradGuard no_grad;
  const at::Tensor weight = decoder.output_weight().value.detach();
  const auto wide = core::device::accumulation_dtype(decoder.dtype());
  const int64_t rows = hidden_SD.size(0), step = logit_rows(weight.size(0));
  at::Tensor grad_hidden = gradients != nullptr ? at::empty(hidden_SD.sizes(), hidden_SD.options()) : at::Tensor();
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t n = std::min(step, rows - begin);
    const at::Tensor hidden = hidden_SD.narrow(0, begin, n).detach();
    at::Tensor logits = at::mm(hidden, weight.t()).to(wide);
    if (temperature != 1.0) logits.div_(temperature);
    // The largest logit becomes 0, so that the log-sum-exp is small and rounds finely; log-probs do not change.
    logits.sub_(logits.amax({1}, /*keepdim=*/true));
    const at::Tensor target = targets_S.narrow(0, begin, n).unsqueeze(1);
    const at::Tensor lse = at::logsumexp(logits, {1}, /*keepdim=*/true);
    const auto derivatives = loss(begin, to_doubles((logits.gather(1, target) - lse).squeeze(1)), {}).by_logprob;
    if (gradients == nullptr) continue;
    const at::Tensor d = at::tensor(derivatives, at::kDouble).to(logits.options()).unsqueeze(1).div_(temperature);
    logits.sub_(lse).exp_().mul_(-d).scatter_add_(1, target, d);
    const at::Tensor grad_logits = logits.to(decoder.dtype());
    grad_hidden.narrow(0, begin, n).copy_(at::mm(grad_logits, weight));
    if (gradients->wants(decoder.output_weight())) gradients->add_outer(decoder.output_weight(), grad_logits, hidden);
  }
  return grad_hidden;
}

}  // namespace longstraw
