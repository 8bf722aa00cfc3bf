#include "longstraw/decode_group.h"

#include "longstraw/decode_execution.h"
#include "longstraw/run_layers.h"

#include "core/device/device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

namespace longstraw {
namespace {

// Keeps the k likeliest, then the likeliest that hold a share p of what is left; the others become -inf.
at::Tensor filtered(const at::Tensor& logits_BV, int64_t top_k, double top_p) {
  at::Tensor logits = logits_BV;
  if (top_k > 0 && top_k < logits.size(1)) {
    const at::Tensor least = std::get<0>(logits.topk(top_k, 1)).narrow(1, top_k - 1, 1);
    logits = logits.masked_fill(logits.lt(least), -INFINITY);
  }
  if (top_p < 1.0) {
    const auto [sorted, index] = logits.sort(/*stable=*/true, 1, /*descending=*/true);
    const at::Tensor probabilities = at::softmax(sorted, 1);
    const at::Tensor before = probabilities.cumsum(1) - probabilities;
    logits = at::empty_like(logits).scatter_(1, index, sorted.masked_fill(before.ge(top_p), -INFINITY));
  }
  return logits;
}

// Streams of one seed must not be shifted copies of each other: mix both (splitmix64).
uint64_t mixed_seed(uint64_t seed, uint64_t stream) {
  uint64_t z = seed + 0x9E3779B97F4A7C15ull * (stream + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Draws one token for each row of logits [B, V]; at temperature 0 the likeliest, of equal ones the lowest id. [B, 1].
at::Tensor draw(const at::Tensor& logits_BV, const core::data::RolloutConfig& rollout, at::Generator& generator) {
  if (rollout.temperature == 0.0) return logits_BV.argmax(1, /*keepdim=*/true);
  const at::Tensor kept = filtered(logits_BV, rollout.top_k, rollout.top_p);
  return at::multinomial(at::softmax(kept, 1).to(at::kDouble), 1, /*replacement=*/true, generator);
}

}  // namespace

std::vector<SampledResponse> decode_group(const PromptToContinue& prompt, uint64_t stream, const SamplerOptions& options) {
  const at::NoGradGuard no_grad;
  const auto& rollout = options.rollout;
  const auto& decoder = prompt.decoder;
  const int64_t members = rollout.num_generations;
  DecodeExecution execution(decoder, prompt.state, prompt.past_tokens, members, rollout.max_completion_length);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(mixed_seed(rollout.seed, stream));
  const auto wide = core::device::accumulation_dtype(decoder.dtype());
  std::vector<SampledResponse> responses(members);
  std::vector<int64_t> ids(members, prompt.last_id);
  int64_t going = members;
  for (int64_t t = 0; t < rollout.max_completion_length && going > 0; ++t) {
    const at::Tensor hidden =
        run_layers(decoder, ids, std::vector<int64_t>(members, prompt.past_tokens + t), prompt.lengths, execution,
                   /*with_output=*/true);
    execution.next_token();
    at::Tensor logits = at::mm(hidden, decoder.output_weight().value.detach().t()).to(at::kCPU, wide);
    if (rollout.temperature > 0.0) logits.div_(rollout.temperature);
    const at::Tensor choice = draw(logits, rollout, generator);
    const at::Tensor logprobs = (logits.gather(1, choice) - at::logsumexp(logits, {1}, /*keepdim=*/true)).to(at::kDouble);
    for (int64_t b = 0; b < members; ++b) ids[b] = choice[b][0].item<int64_t>();
    for (int64_t b = 0; b < members; ++b) {
      if (!responses[b].truncated) continue;
      responses[b].completion_ids.push_back(ids[b]);
      responses[b].sampling_logprobs.push_back(logprobs[b][0].item<double>());
      responses[b].truncated = std::count(options.stop_token_ids.begin(), options.stop_token_ids.end(), ids[b]) == 0;
      if (!responses[b].truncated) --going;
    }
    if (options.progress) options.progress(t + 1);
  }
  return responses;
}

}  // namespace longstraw
