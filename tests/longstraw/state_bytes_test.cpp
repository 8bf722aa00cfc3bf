// What a run holds of a prompt, in bytes, is what the descriptions of the mixers say (core/model/state_size.h): rows times
// tokens, carried values times borders, choices of experts times tokens.
#include "longstraw/trainer.h"

#include "core/model/state_size.h"
#include "tests/support/families.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace longstraw {
namespace {

using core::model::Decoder;
using core::model::StateSize;

constexpr int64_t kPrompt = 30;  // 29 tokens of state: the last one belongs to every response
constexpr int64_t kState = kPrompt - 1;

struct Shape {
  int64_t segment = 0;
  std::vector<int64_t> responses;
};

// Every token mixes with a prefix of 29 tokens in segments of one, ragged ones, and one of all; responses within a segment,
// and (3 tokens at a time) responses that are paths of segments themselves.
const std::vector<Shape>& shapes() {
  static const std::vector<Shape> kShapes{{1, {1}}, {4, {4, 2}}, {29, {9, 5, 1}}, {64, {9}}, {3, {8, 2}}};
  return kShapes;
}

// Nodes along the longest path, and the tokens they leave: the last piece of a response leaves nothing.
int64_t pieces(int64_t tokens, int64_t segment) { return (tokens + segment - 1) / segment; }
int64_t response_nodes(const Shape& shape) {
  return pieces(*std::max_element(shape.responses.begin(), shape.responses.end()), shape.segment) - 1;
}

// The sum of all log-probs, with a weight for each member so that nothing cancels.
class SummedLogprobs final : public TokenObjective {
 public:
  TokenLoss token(int64_t, int64_t member, int64_t, double logprob, double) const override {
    const double weight = 1.0 / static_cast<double>(member + 1);
    return {.policy = -weight * logprob, .derivative = -weight};
  }
  bool has_gradient(int64_t, int64_t) const override { return true; }
};

core::model::StepGradient step_of(const Decoder& decoder, int64_t vocab, const Shape& shape, LongstrawConfig config) {
  config.segment_tokens = shape.segment;
  config.memory_budget = {0};  // every segment is recomputed
  return longstraw_gradient(decoder, {test::random_group(vocab, kPrompt, shape.responses, 5)}, SummedLogprobs(),
                            {.longstraw = config});
}

class StateBytes : public testing::TestWithParam<test::Family> {};

TEST_P(StateBytes, OfAnExactRunAreRowsTimesTokensAndCarriedValuesTimesBorders) {
  for (const auto dtype : {at::kDouble, at::kBFloat16}) {
    const auto decoder = test::tiny_decoder(GetParam().config, dtype);
    for (const Shape& shape : shapes()) {
      const auto step = step_of(*decoder, GetParam().config["vocab_size"], shape, {});
      const int64_t own = response_nodes(shape), tokens = kState + own * shape.segment;
      const int64_t borders = pieces(kState, shape.segment) + own;
      const StateSize all = core::model::total(core::model::state_sizes(decoder->states(), dtype, tokens));
      const int64_t rows = all.exact_bytes - all.border_bytes;
      EXPECT_EQ(step.bytes.at("state_bytes"),
                rows + borders * all.border_bytes + tokens * core::model::expert_choice_bytes(decoder->routers()))
          << GetParam().name << " " << dtype << " segments of " << shape.segment;
      // Beside the path of a long response stands a shorter one that was replayed before it: the border between them has its
      // adjoint while the path's own borders get theirs.
      const int64_t of_border = core::model::total(core::model::state_sizes(decoder->states(), dtype, 0)).adjoint_bytes;
      EXPECT_EQ(step.bytes.at("adjoint_bytes"), all.adjoint_bytes + (own > 0 ? of_border : 0))
          << GetParam().name << " " << dtype << " segments of " << shape.segment;
    }
  }
}

// Rows of a window of W that are held at most: whole segments go once no token from the segment at hand on sees any of theirs.
int64_t window_tokens_held(int64_t window, int64_t segment) {
  int64_t most = 0;
  for (int64_t begin = 0; begin < kState; begin += segment) {
    const int64_t first_seen = std::max<int64_t>(0, begin - window + 1);
    most = std::max(most, std::min(begin + segment, kState) - first_seen / segment * segment);
  }
  return most;
}

// Without a gradient through the prompt a windowed mixer keeps its window and the segment at hand, and a carried value is held
// twice: before and after that segment.
TEST_P(StateBytes, OfADetachedRunAreTheTablesFigureAndTheSegmentAtHand) {
  for (const auto dtype : {at::kDouble, at::kBFloat16}) {
    const auto decoder = test::tiny_decoder(GetParam().config, dtype);
    for (const int64_t segment : {1, 4, 29}) {
      int64_t wanted = 0;
      for (const auto& state : decoder->states()) {
        const StateSize size = core::model::total(core::model::state_sizes({state}, dtype, kState));
        const int64_t row_bytes = (size.exact_bytes - size.border_bytes) / kState;
        wanted += row_bytes * (state.window ? window_tokens_held(*state.window, segment) : kState);
        wanted += size.border_bytes * (segment < kState ? 2 : 1);
      }
      const auto step =
          step_of(*decoder, GetParam().config["vocab_size"], {segment, {1}}, {.prompt_gradient = PromptGradient::kDetached});
      EXPECT_EQ(step.bytes.at("state_bytes"), wanted) << GetParam().name << " " << dtype << " segments of " << segment;
      EXPECT_EQ(step.bytes.at("adjoint_bytes"), 0);
    }
  }
}

// Under tail what only a backward pass needs is held of the tail alone: adjoints, borders and choices of experts.
TEST_P(StateBytes, OfATailRunAreHeldForTheTailAlone) {
  constexpr int64_t kTail = 10, kSegment = 4;
  for (const auto dtype : {at::kDouble, at::kBFloat16}) {
    const auto decoder = test::tiny_decoder(GetParam().config, dtype);
    const auto& states = decoder->states();
    if (std::any_of(states.begin(), states.end(), [](const auto& s) { return s.window.has_value(); })) {
      GTEST_SKIP() << "windows are counted above";
    }
    const StateSize all = core::model::total(core::model::state_sizes(states, dtype, kState));
    const StateSize tail = core::model::total(core::model::state_sizes(states, dtype, kTail));
    const auto step = step_of(*decoder, GetParam().config["vocab_size"], {kSegment, {2}},
                              {.prompt_gradient = PromptGradient::kTail, .tail_tokens = kTail});
    const int64_t borders = 1 + pieces(kTail, kSegment);  // where the tail begins, and its segments' ends
    EXPECT_EQ(step.bytes.at("state_bytes"),
              all.exact_bytes + (borders - 1) * all.border_bytes + kTail * core::model::expert_choice_bytes(decoder->routers()));
    EXPECT_EQ(step.bytes.at("adjoint_bytes"), tail.adjoint_bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(, StateBytes, testing::ValuesIn(test::small_families()), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace longstraw
