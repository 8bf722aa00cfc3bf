#include "longstraw/sampler.h"

#include "reference/gradient.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace longstraw {
namespace {

using core::model::Decoder;

const std::vector<nlohmann::json>& models() {
  static const std::vector<nlohmann::json> kModels{
      nlohmann::json::object(), {{"model_type", "mistral"}, {"sliding_window", 5}}, {{"model_type", "qwen3"}}};
  return kModels;
}

at::Tensor logits_of(const Decoder& decoder, const std::vector<int64_t>& prompt, const SampledResponse& response) {
  const auto length = int64_t(prompt.size() + response.completion_ids.size());
  const at::NoGradGuard no_grad;
  return reference::response_logits(decoder, prompt, response.completion_ids, {length, length}, {});
}

// The sampler's log-probs are those of the whole sequence run without any cache.
TEST(Sampler, LogprobsAreThoseOfTheReference) {
  for (const auto& model : models()) {
    const auto decoder = test::tiny_decoder(test::tiny_config(model), at::kDouble);
    for (const int64_t length : {1, 2, 11}) {
      const auto prompt = test::random_group(32, length, {1}, 4).prompt_ids;
      const SamplerOptions options{.rollout = {.num_generations = 5, .max_completion_length = 9, .temperature = 0.8, .seed = 3},
                                   .segment_tokens = 4};
      for (const auto& response : sample_group(*decoder, prompt, 0, options)) {
        ASSERT_EQ(response.completion_ids.size(), 9u);
        const at::Tensor logprobs = at::log_softmax(logits_of(*decoder, prompt, response) / 0.8, -1);
        for (int64_t t = 0; t < 9; ++t) {
          EXPECT_NEAR(response.sampling_logprobs[t], logprobs[t][response.completion_ids[t]].item<double>(), 1e-12) << model.dump();
        }
      }
    }
  }
}

TEST(Sampler, TopKOfOneAndTinyTopPAreGreedy) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const auto prompt = test::random_group(32, 7, {1}, 4).prompt_ids;
  core::data::RolloutConfig rollout{.num_generations = 3, .max_completion_length = 6};
  for (const bool by_k : {true, false}) {
    auto greedy = rollout;
    if (by_k) greedy.top_k = 1;
    else greedy.top_p = 1e-9;
    const auto responses = sample_group(*decoder, prompt, 0, {.rollout = greedy});
    const at::Tensor best = logits_of(*decoder, prompt, responses[0]).argmax(-1);
    for (const auto& response : responses) {
      for (int64_t t = 0; t < 6; ++t) EXPECT_EQ(response.completion_ids[t], best[t].item<int64_t>());
    }
  }
}

TEST(Sampler, TopKAndTopPNeverLeaveTheirSet) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const auto prompt = test::random_group(32, 7, {1}, 4).prompt_ids;
  const auto responses =
      sample_group(*decoder, prompt, 0, {.rollout = {.num_generations = 16, .max_completion_length = 6, .top_k = 4, .top_p = 0.7}});
  for (const auto& response : responses) {
    const at::Tensor logits = logits_of(*decoder, prompt, response);
    const auto [top, index] = logits.topk(4, -1);
    const at::Tensor share = at::softmax(top, -1);
    const at::Tensor before = share.cumsum(-1) - share;
    for (int64_t t = 0; t < 6; ++t) {
      const at::Tensor allowed = index[t].masked_select(before[t].lt(0.7));
      EXPECT_TRUE(allowed.eq(response.completion_ids[t]).any().item<bool>());
    }
  }
}

TEST(Sampler, FrequenciesAreTheModels) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const auto prompt = test::random_group(32, 7, {1}, 4).prompt_ids;
  constexpr int64_t kDraws = 4000;
  const auto responses = sample_group(*decoder, prompt, 0, {.rollout = {.num_generations = kDraws, .max_completion_length = 1}});
  std::vector<double> counts(32, 0.0);
  for (const auto& response : responses) counts[response.completion_ids[0]] += 1.0;
  const at::Tensor probabilities = at::softmax(logits_of(*decoder, prompt, responses[0]), -1)[0];
  for (int64_t id = 0; id < 32; ++id) {
    const double p = probabilities[id].item<double>();
    EXPECT_NEAR(counts[id], kDraws * p, 5.0 * std::sqrt(kDraws * p * (1.0 - p)) + 1.0) << id;  // five standard deviations
  }
}

TEST(Sampler, SeedAndStreamDecideAndStopTokensEnd) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const auto prompt = test::random_group(32, 7, {1}, 4).prompt_ids;
  const SamplerOptions options{.rollout = {.num_generations = 4, .max_completion_length = 12, .seed = 7}};
  const auto sampled = [&](const SamplerOptions& o, uint64_t stream) {
    std::vector<std::vector<int64_t>> ids;
    for (const auto& response : sample_group(*decoder, prompt, stream, o)) ids.push_back(response.completion_ids);
    return ids;
  };
  const auto first = sampled(options, 0);
  EXPECT_EQ(first, sampled(options, 0));
  EXPECT_NE(first, sampled(options, 1));
  EXPECT_NE(first[0], first[1]);
  SamplerOptions stopping = options;
  stopping.stop_token_ids = {first[0][3], first[1][5]};
  const auto stopped = sampled(stopping, 0);
  for (size_t b = 0; b < stopped.size(); ++b) {
    const auto& stop = stopping.stop_token_ids;
    const auto end = std::find_first_of(first[b].begin(), first[b].end(), stop.begin(), stop.end());
    const auto length = std::min<size_t>(12, end - first[b].begin() + 1);
    EXPECT_EQ(stopped[b], std::vector<int64_t>(first[b].begin(), first[b].begin() + length));
  }
}

}  // namespace
}  // namespace longstraw
