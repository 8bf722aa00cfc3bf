// LongStraw against Hugging Face transformers on every variant of fixtures/golden: gradients of the three arms, log-probs,
// the prompt state and its adjoint.
#include "longstraw/trainer.h"

#include "longstraw/sweep.h"
#include "tests/support/closeness.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace longstraw {
namespace {

using core::model::Decoder;
using test::Golden;

constexpr double kFloat64 = 1e-10;

// The goldens' loss: -Σ w lp.
class WeightedObjective final : public TokenObjective {
 public:
  explicit WeightedObjective(const std::vector<std::vector<std::vector<double>>>& weights) : weights_(weights) {}
  TokenLoss token(int64_t prompt, int64_t member, int64_t index, double logprob, double) const override {
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
    EXPECT_EQ(step.facts.at("changed_choices"), 0);
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

// What a golden calls the parts of a slot: the columns of its rows or its carried values.
struct GoldenPart {
  std::string name;
  at::Tensor state, adjoint;  // the adjoint is undefined where none is defined
};

// Without the leading dimension of one sequence.
at::Tensor golden_tensor(const Golden& golden, const std::string& name, int64_t dimensions) {
  const at::Tensor tensor = golden[name];
  return tensor.dim() > dimensions ? tensor.squeeze(0) : tensor;
}

std::vector<GoldenPart> parts_of_slot(const core::model::MixerState& described, int64_t slot, const PromptState& state,
                                      int64_t tokens) {
  std::vector<GoldenPart> parts;
  for (size_t part = 0; part < described.rows.size(); ++part) {
    const auto& rows = described.rows[part];
    const at::Tensor value = state.rows(slot, int64_t(part), 0, tokens);
    const at::Tensor adjoint = rows.adjoint ? state.rows_adjoint(slot, int64_t(part), 0, tokens) : at::Tensor();
    parts.push_back({rows.name, value, adjoint});
  }
  for (size_t part = 0; part < described.carried.size(); ++part) {
    parts.push_back({described.carried[part].name, state.carried(slot, int64_t(part), tokens),
                     state.carried_adjoint(slot, int64_t(part), tokens)});
  }
  return parts;
}

// The latents' rows hold both of transformers' tensors side by side.
std::vector<GoldenPart> split_latents(const std::vector<GoldenPart>& parts, const Golden& golden, const std::string& layer) {
  std::vector<GoldenPart> split;
  for (const GoldenPart& part : parts) {
    if (part.name != "latent") {
      split.push_back(part);
      continue;
    }
    const int64_t latent = golden["state." + layer + ".latent"].size(-1), rotary = part.state.size(-1) - latent;
    split.push_back({"latent", part.state.narrow(-1, 0, latent), part.adjoint.narrow(-1, 0, latent)});
    split.push_back({"rotary_key", part.state.narrow(-1, latent, rotary), part.adjoint.narrow(-1, latent, rotary)});
  }
  return split;
}

TEST_P(ParityGolden, StateAndAdjointAreThoseOfTransformers) {
  const Golden golden = test::read_golden(GetParam(), "f64");
  const bool has_state = std::any_of(golden.tensors.begin(), golden.tensors.end(),
                                     [](const auto& entry) { return entry.first.starts_with("state."); });
  if (!has_state) GTEST_SKIP() << "a variant of the file format only";
  const auto decoder = core::model::load_decoder(test::golden_folder(GetParam()), at::kDouble, at::kCPU);
  const LongstrawConfig config{.segment_tokens = 1000};  // one node: its adjoint is complete before it is swept
  const TokenTree tree = build_token_tree(golden.batch, config);
  const WeightedObjective objective(golden.weights);
  GradientStore gradients(*decoder);
  size_t compared = 0;
  SweepOptions options{.replay_batch = 2, .lengths = sequence_lengths(golden.batch)};
  options.before_backward = [&](const Node& node, const PromptState& state) {
    const auto tokens = static_cast<int64_t>(node.tokens.size());
    for (size_t slot = 0; slot < decoder->states().size(); ++slot) {
      const auto& described = decoder->states()[slot];
      const std::string layer = std::to_string(described.layer);
      for (const GoldenPart& part : split_latents(parts_of_slot(described, int64_t(slot), state, tokens), golden, layer)) {
        const auto expect = [&](const std::string& kind, at::Tensor got) {
          const std::string name = kind + "." + layer + "." + part.name;
          ASSERT_TRUE(golden.has(name)) << name;
          const at::Tensor wanted = golden_tensor(golden, name, got.dim());
          // transformers keeps no more than the window of a sliding layer: the last tokens.
          if (described.window) got = got.narrow(1, got.size(1) - wanted.size(1), wanted.size(1));
          ASSERT_EQ(got.numel(), wanted.numel()) << name;
          got = got.reshape_as(wanted);  // one head more or less is written as a dimension of 1
          EXPECT_LE(test::relative_l2(got, wanted), kFloat64) << name;
          ++compared;
        };
        expect("state", part.state);
        if (part.adjoint.defined()) expect("adjoint", part.adjoint);
      }
    }
  };
  sweep(*decoder, golden.batch, tree, objective, {}, options, gradients);
  const auto in_golden = std::count_if(golden.tensors.begin(), golden.tensors.end(), [](const auto& entry) {
    return entry.first.starts_with("state.") || entry.first.starts_with("adjoint.");
  });
  EXPECT_EQ(int64_t(compared), in_golden);
}

INSTANTIATE_TEST_SUITE_P(Variants, ParityGolden, testing::ValuesIn(test::golden_variants()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace longstraw
