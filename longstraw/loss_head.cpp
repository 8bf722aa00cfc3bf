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

// Row blocks of a slice, so that what entropies need beside the log-probs is small against them.
constexpr int64_t kEntropyBlocks = 8;

template <class Visit>
void for_blocks(int64_t rows, const Visit& visit) {
  const int64_t step = std::max<int64_t>(1, rows / kEntropyBlocks);
  for (int64_t begin = 0; begin < rows; begin += step) visit(begin, std::min(step, rows - begin));
}

// H = −Σ p log p, [S].
at::Tensor entropies_of(const at::Tensor& log_probs_SV) {
  at::Tensor entropies_S = at::empty({log_probs_SV.size(0)}, log_probs_SV.options());
  for_blocks(log_probs_SV.size(0), [&](int64_t begin, int64_t n) {
    const at::Tensor log_probs = log_probs_SV.narrow(0, begin, n);
    entropies_S.narrow(0, begin, n).copy_(log_probs.exp().mul_(log_probs).sum({1}).neg_());
  });
  return entropies_S;
}

at::Tensor column(const std::vector<double>& values, const at::Tensor& like, double temperature) {
  return at::tensor(values, at::kDouble).to(like.options()).unsqueeze(1).div_(temperature);
}

// Turns log-probs into dL/dlogits, in place: d (onehot − p) − e p (log p + H), d and e divided by the temperature.
void to_grad_logits(at::Tensor& log_probs_SV, const at::Tensor& targets_S1, const at::Tensor& entropies_S,
                    const RowDerivatives& derivatives, double temperature) {
  const at::Tensor d = column(derivatives.by_logprob, log_probs_SV, temperature);
  if (derivatives.by_entropy.empty()) {
    log_probs_SV.exp_().mul_(-d);
  } else {
    const at::Tensor e = column(derivatives.by_entropy, log_probs_SV, temperature);
    for_blocks(log_probs_SV.size(0), [&](int64_t begin, int64_t n) {
      at::Tensor block = log_probs_SV.narrow(0, begin, n);
      const at::Tensor pull = block.add(entropies_S.narrow(0, begin, n).unsqueeze(1));
      pull.mul_(e.narrow(0, begin, n)).add_(d.narrow(0, begin, n));
      block.exp_().mul_(pull).neg_();
    });
  }
  log_probs_SV.scatter_add_(1, targets_S1, d);
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
    const std::vector<double> logprobs = to_doubles((logits.gather(1, target) - lse).squeeze(1));
    if (gradients != nullptr || options.entropy) logits.sub_(lse);
    const at::Tensor entropies = options.entropy ? entropies_of(logits) : at::Tensor();
    const RowDerivatives derivatives = loss(begin, logprobs, options.entropy ? to_doubles(entropies) : std::vector<double>());
    if (gradients == nullptr) continue;
    to_grad_logits(logits, target, entropies, derivatives, temperature);
    const at::Tensor grad_logits = logits.to(decoder.dtype());
    grad_hidden.narrow(0, begin, n).copy_(at::mm(grad_logits, weight));
    if (gradients->wants(decoder.output_weight())) gradients->add_outer(decoder.output_weight(), grad_logits, hidden);
  }
  return grad_hidden;
}

}  // namespace longstraw
