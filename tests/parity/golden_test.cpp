// LongStraw against Hugging Face transformers on every variant of fixtures/golden: gradients of the three arms, log-probs,
// the prompt state and its adjoint.
#include "longstraw/trainer.h"

#include "longstraw/sweep.h"
#include "tests/support/closeness.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace longstraw {
namespace {

using core::model::Decoder;
using test::Golden;

constexpr double kFloat64 = 1e-10;

// The goldens' loss: -Σ w lp.
class WeightedObjective final : public TokenObjective {
 public:
  explicit WeightedObjective(const std::vector<std::vector<std::vector<double>>>& weights) : weights_(weights) {}
  TokenLoss token(int64_t prompt, int64_t member, int64_t index, double logprob) const override {
    const double weight = weights_[prompt][member][index];
    return {.policy = -weight * logprob, .derivative = -weight};
  }
  bool has_gradient(int64_t, int64_t) const override { return true; }

 private:
  const std::vector<std::vector<std::vector<double>>>& weights_;
};

std::vector<at::Tensor> golden_gradient(const Decoder& decoder, const Golden& golden, const std::string& prefix) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : decoder.parameters()) gradients.push_back(golden[prefix + parameter->name]);
  return gradients;
}

class ParityGolden : public testing::TestWithParam<std::string> {
 protected:
  void expect_gradient(const Decoder& decoder, const Golden& golden, const std::string& prefix, const LongstrawConfig& config,
                       double bound) {
    if (!golden.has(prefix + decoder.parameters().front()->name)) return;  // a variant of the file format only
    const WeightedObjective objective(golden.weights);
    const auto step = longstraw_gradient(decoder, golden.batch, objective, {.longstraw = config});
    const auto error = test::gradient_error(decoder, step.gradients, golden_gradient(decoder, golden, prefix), 1e-6);
    EXPECT_LE(error.whole, bound) << prefix << " segments of " << config.segment_tokens;
    EXPECT_LE(error.worst, 100 * bound) << prefix << error.worst_parameter;
    EXPECT_EQ(step.facts.at("recompute_mismatches"), 0);
    printf("    %-22s %-15s segments of %2ld: relative L2 %.2e, worst parameter %.2e %s\n", GetParam().c_str(), prefix.c_str(),
           config.segment_tokens, error.whole, error.worst, error.worst_parameter.c_str());
    for (size_t g = 0; g < step.logprobs[0].size(); ++g) {
      const at::Tensor logprobs = at::tensor(at::ArrayRef<double>(step.logprobs[0][g]), at::kDouble);
      EXPECT_LE(test::relative_l2(logprobs, golden["full.logprob." + std::to_string(g)]), bound);
    }
  }

  void expect_arms(const Decoder& decoder, const Golden& golden, double bound) {
    for (const int64_t segment : {1, 6, 64}) {
      LongstrawConfig config{.segment_tokens = segment, .replay_batch = segment == 6 ? 3 : 1};
      if (segment == 6) config.memory_budget = {0};  // every segment recomputed
      expect_gradient(decoder, golden, "full.grad.", config, bound);
      config.prompt_gradient = PromptGradient::kDetached;
      expect_gradient(decoder, golden, "detached.grad.", config, bound);
      config.prompt_gradient = PromptGradient::kTail;
      config.tail_tokens = 5;
      expect_gradient(decoder, golden, "tail.5.grad.", config, bound);
    }
  }
};

TEST_P(ParityGolden, GradientsAreThoseOfTransformersInFloat64) {
  const auto decoder = core::model::load_decoder(test::golden_folder(GetParam()), at::kDouble, at::kCPU);
  expect_arms(*decoder, test::read_golden(GetParam(), "f64"), kFloat64);
}

TEST_P(ParityGolden, GradientsInFloat32AreAsCloseAsRoundingAllows) {
  if (!test::has_golden(GetParam(), "f32")) GTEST_SKIP() << "a variant of the file format only";
  const Golden exact = test::read_golden(GetParam(), "f64");
  const auto decoder = core::model::load_decoder(test::golden_folder(GetParam()), at::kFloat, at::kCPU);
  expect_arms(*decoder, exact, test::rounding_bound(*decoder, exact.lengths().longest, at::kFloat));
}

TEST_P(ParityGolden, StateAndAdjointAreThoseOfTransformers) {
  const Golden golden = test::read_golden(GetParam(), "f64");
  if (!golden.has("state.0.key")) GTEST_SKIP() << "a variant of the file format only";
  const auto decoder = core::model::load_decoder(test::golden_folder(GetParam()), at::kDouble, at::kCPU);
  const LongstrawConfig config{.segment_tokens = 1000};  // one node: its adjoint is complete before it is swept
  const TokenTree tree = build_token_tree(golden.batch, config);
  const WeightedObjective objective(golden.weights);
  GradientStore gradients(*decoder);
  int64_t compared = 0;
  SweepOptions options{.replay_batch = 2, .lengths = sequence_lengths(golden.batch)};
  options.before_backward = [&](const Node& node, const PromptState& state) {
    for (int64_t n = 0; n < decoder->layers(); ++n) {
      const auto expect = [&](const std::string& name, const at::Tensor& got) {
        at::Tensor wanted = golden[name];
        if (wanted.dim() == 4) wanted = wanted.squeeze(0);
        // transformers keeps no more than the window of a sliding layer: the last tokens.
        const int64_t kept = wanted.size(1);
        EXPECT_LE(test::relative_l2(got.narrow(1, got.size(1) - kept, kept), wanted), kFloat64) << name;
        ++compared;
      };
      const std::string layer = std::to_string(n);
      const auto tokens = static_cast<int64_t>(node.tokens.size());
      expect("state." + layer + ".key", state.keys(n, 0, tokens));
      expect("state." + layer + ".value", state.values(n, 0, tokens));
      expect("adjoint." + layer + ".key", state.key_adjoint(n, 0, tokens));
      expect("adjoint." + layer + ".value", state.value_adjoint(n, 0, tokens));
    }
  };
  sweep(*decoder, golden.batch, tree, objective, {}, options, gradients);
  EXPECT_EQ(compared, 4 * decoder->layers());
}

INSTANTIATE_TEST_SUITE_P(Variants, ParityGolden, testing::ValuesIn(test::golden_variants()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace longstraw
