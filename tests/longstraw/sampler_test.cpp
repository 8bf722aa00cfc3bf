#include "longstraw/sampler.h"

#include "reference/gradient.h"
#include "tests/support/closeness.h"
#include "tests/support/families.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>

namespace longstraw {
namespace {

using core::model::Decoder;

at::Tensor logits_of(const Decoder& decoder, const std::vector<int64_t>& prompt, const SampledResponse& response) {
  const auto length = int64_t(prompt.size() + response.completion_ids.size());
  const at::NoGradGuard no_grad;
  return reference::response_logits(decoder, prompt, response.completion_ids, {length, length}, {});
}

// Log-probs of the sampled tokens by the reference: the whole sequence, without any cache.
at::Tensor reference_logprobs(const Decoder& decoder, const std::vector<int64_t>& prompt, const SampledResponse& response,
                              double temperature) {
  const at::Tensor logits = logits_of(decoder, prompt, response).to(at::kDouble) / temperature;
  return at::log_softmax(logits, -1).gather(1, at::tensor(response.completion_ids, at::kLong).unsqueeze(1)).squeeze(1);
}

// The largest distance of a sampled log-prob from the reference's, over prompts shorter than a convolution, than a segment and
// longer than either, and responses shorter and longer than a convolution.
double largest_logprob_error(const Decoder& decoder, int64_t vocab, int64_t members) {
  constexpr double kTemperature = 0.8;
  double largest = 0.0;
  for (const int64_t length : {1, 2, 3, 30}) {
    for (const int64_t tokens : {2, 9}) {
      const auto prompt = test::random_group(vocab, length, {1}, uint64_t(length)).prompt_ids;
      const SamplerOptions options{
          .rollout = {.num_generations = members, .max_completion_length = tokens, .temperature = kTemperature, .seed = 3},
          .segment_tokens = 4};
      const auto responses = sample_group(decoder, prompt, 0, options);
      EXPECT_EQ(int64_t(responses.size()), members);
      for (const auto& response : responses) {
        EXPECT_EQ(int64_t(response.sampling_logprobs.size()), tokens);
        const at::Tensor wanted = reference_logprobs(decoder, prompt, response, kTemperature);
        const at::Tensor error = at::tensor(response.sampling_logprobs, at::kDouble).sub(wanted).abs().max();
        // A NaN must not pass for a small number.
        largest = error.isfinite().item<bool>() ? std::max(largest, error.item<double>()) : INFINITY;
      }
    }
  }
  return largest;
}

class SamplerOfFamily : public testing::TestWithParam<test::Family> {};

TEST_P(SamplerOfFamily, LogprobsAreThoseOfTheReference) {
  const auto decoder = test::tiny_decoder(GetParam().config, at::kDouble);
  const double error = largest_logprob_error(*decoder, GetParam().config["vocab_size"], 3);
  printf("    %-24s largest distance of a log-prob %.1e\n", GetParam().name.c_str(), error);
  EXPECT_LE(error, 1e-10);
}

// An indexer that sees fewer keys than it may choose, from the first token on or never; a choice of one.
TEST_P(SamplerOfFamily, LogprobsAreThoseOfTheReferenceForAnyNumberOfSelectedKeys) {
  nlohmann::json config = GetParam().config;
  if (!config.contains("index_topk")) GTEST_SKIP() << "no indexer";
  for (const int64_t top_k : {1, 3, 30, 64}) {
    config["index_topk"] = top_k;
    const auto decoder = test::tiny_decoder(config, at::kDouble);
    EXPECT_LE(largest_logprob_error(*decoder, config["vocab_size"], 3), 1e-10) << top_k << " selected keys";
  }
}

// A stored prompt state that sampling changed, or one that members shared, would show in the second of two equal calls, or in
// a member that depends on how many there are.
TEST_P(SamplerOfFamily, MembersDoNotTouchEachOther) {
  const auto decoder = test::tiny_decoder(GetParam().config, at::kDouble);
  const auto prompt = test::random_group(GetParam().config["vocab_size"], 11, {1}, 4).prompt_ids;
  const auto sampled = [&](int64_t members) {
    return sample_group(*decoder, prompt, 0,
                        {.rollout = {.num_generations = members, .max_completion_length = 6, .top_k = 1}, .segment_tokens = 4});
  };
  const auto alone = sampled(1), together = sampled(4);  // greedy: all members say the same
  for (const auto& response : together) {
    EXPECT_EQ(response.completion_ids, alone[0].completion_ids);
    for (size_t t = 0; t < 6; ++t) EXPECT_NEAR(response.sampling_logprobs[t], alone[0].sampling_logprobs[t], 1e-12);
  }
}

INSTANTIATE_TEST_SUITE_P(, SamplerOfFamily, testing::ValuesIn(test::small_families()),
                         [](const auto& info) { return info.param.name; });

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

// Temperature 0 takes the likeliest token; what is reported is its log-prob in the model's own distribution.
TEST(Sampler, TemperatureZeroIsGreedyWithUntemperedLogprobs) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const auto prompt = test::random_group(32, 7, {1}, 4).prompt_ids;
  const auto responses =
      sample_group(*decoder, prompt, 0, {.rollout = {.num_generations = 3, .max_completion_length = 6, .temperature = 0.0}});
  const at::Tensor best = logits_of(*decoder, prompt, responses[0]).argmax(-1);
  const at::Tensor wanted = reference_logprobs(*decoder, prompt, responses[0], 1.0);
  for (const auto& response : responses) {
    for (int64_t t = 0; t < 6; ++t) {
      EXPECT_EQ(response.completion_ids[t], best[t].item<int64_t>());
      EXPECT_NEAR(response.sampling_logprobs[t], wanted[t].item<double>(), 1e-10);
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
  const auto responses = sample_group(*decoder, prompt, 0, stopping);
  for (size_t b = 0; b < stopped.size(); ++b) {
    const auto& stop = stopping.stop_token_ids;
    const auto end = std::find_first_of(first[b].begin(), first[b].end(), stop.begin(), stop.end());
    const auto length = std::min<size_t>(12, end - first[b].begin() + 1);
    EXPECT_EQ(stopped[b], std::vector<int64_t>(first[b].begin(), first[b].begin() + length));
    EXPECT_EQ(responses[b].truncated, end == first[b].end());
  }
}

}  // namespace
}  // namespace longstraw
