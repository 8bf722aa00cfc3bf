#include "longstraw/sampler.h"

#include "longstraw/decode_execution.h"
#include "longstraw/prompt_state.h"
#include "longstraw/run_layers.h"
#include "longstraw/segment_execution.h"

#include "core/device/device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

namespace longstraw {
namespace {

using core::model::Decoder;

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

void capture_prompt(const Decoder& decoder, const std::vector<int64_t>& ids, int64_t segment_tokens,
                    core::model::SequenceLengths lengths, PromptState& state) {
  for (int64_t begin = 0; begin < state.capacity(); begin += segment_tokens) {
    const int64_t count = std::min(segment_tokens, state.capacity() - begin);
    SegmentExecution execution(
        {.spans = {{0, count}}, .past = {&state, begin, INT64_MAX}, .state_use = SegmentExecution::StateUse::kWrite});
    const std::vector<int64_t> part(ids.begin() + begin, ids.begin() + begin + count);
    run_layers(decoder, part, positions_from(begin, count), lengths, execution, /*with_output=*/false);
    state.forget_before(begin + count);
  }
}

// Streams of one seed must not be shifted copies of each other: mix both (splitmix64).
uint64_t mixed_seed(uint64_t seed, uint64_t stream) {
  uint64_t z = seed + 0x9E3779B97F4A7C15ull * (stream + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace

std::vector<SampledResponse> sample_group(const Decoder& decoder, const std::vector<int64_t>& prompt_ids, uint64_t stream,
                                          const SamplerOptions& options) {
  const at::NoGradGuard no_grad;
  const auto& rollout = options.rollout;
  const int64_t members = rollout.num_generations, prompt = static_cast<int64_t>(prompt_ids.size());
  const core::model::SequenceLengths lengths{prompt + 1, prompt + rollout.max_completion_length};
  PromptState state(decoder, prompt - 1, prompt - 1);
  capture_prompt(decoder, prompt_ids, options.segment_tokens, lengths, state);

  DecodeExecution execution(decoder, state, prompt - 1, members, rollout.max_completion_length);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(mixed_seed(rollout.seed, stream));
  const auto wide = core::device::accumulation_dtype(decoder.dtype());
  std::vector<SampledResponse> responses(members);
  std::vector<bool> done(members, false);
  std::vector<int64_t> ids(members, prompt_ids.back());
  for (int64_t t = 0; t < rollout.max_completion_length; ++t) {
    const at::Tensor hidden = run_layers(decoder, ids, std::vector<int64_t>(members, prompt - 1 + t), lengths, execution,
                                         /*with_output=*/true);
    execution.next_token();
    const at::Tensor logits =
        at::mm(hidden, decoder.output_weight().value.detach().t()).to(at::kCPU, wide).div_(rollout.temperature);
    const at::Tensor choice = at::multinomial(at::softmax(filtered(logits, rollout.top_k, rollout.top_p), 1).to(at::kDouble), 1,
                                              /*replacement=*/true, generator);
    const at::Tensor logprobs = (logits.gather(1, choice) - at::logsumexp(logits, {1}, /*keepdim=*/true)).to(at::kDouble);
    for (int64_t b = 0; b < members; ++b) ids[b] = choice[b][0].item<int64_t>();
    bool all_done = true;
    for (int64_t b = 0; b < members; ++b) {
      if (done[b]) continue;
      responses[b].completion_ids.push_back(ids[b]);
      responses[b].sampling_logprobs.push_back(logprobs[b][0].item<double>());
      done[b] = std::count(options.stop_token_ids.begin(), options.stop_token_ids.end(), ids[b]) > 0;
      all_done = all_done && done[b];
    }
    if (options.progress) options.progress(t + 1);
    if (all_done) break;
  }
  return responses;
}

}  // namespace longstraw
