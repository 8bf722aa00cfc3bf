// Mixture of experts: who is chosen, with what weight, and what gets a gradient.
#include "core/model/blocks/experts.h"

#include "tests/model/plain_execution.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace longstraw::core::model {
namespace {

constexpr int64_t kHidden = 6, kExperts = 8, kChosen = 3, kWidth = 5, kTokens = 7;

ExpertsSpec spec_of(const Routing& routing) {
  return {.layer = 0, .hidden = kHidden, .shape = {.experts = kExperts, .chosen = kChosen, .width = kWidth}, .routing = routing};
}

struct Layer {
  Builder builder;
  std::unique_ptr<ExpertsBlock> block;
  PlainExecution execution;
  at::Tensor x_SD;

  explicit Layer(const ExpertsSpec& spec, uint64_t seed = 1, at::ScalarType dtype = at::kDouble) {
    block = std::make_unique<ExpertsBlock>(builder, "m.", spec);
    fill(builder, dtype, seed);
    x_SD = at::randn({kTokens, kHidden}, at::kDouble).to(dtype).set_requires_grad(true);
  }
  at::Tensor output() { return block->output(x_SD, {}, execution); }
  const at::Tensor& value(const std::string& name) { return parameter_of(builder, "m." + name).value; }
  // Output of expert e alone for token t.
  at::Tensor expert(int64_t e, int64_t t) {
    const std::string one = "experts." + std::to_string(e) + ".";
    const at::Tensor inner =
        at::silu(at::mv(value(one + "gate_proj.weight"), x_SD[t])) * at::mv(value(one + "up_proj.weight"), x_SD[t]);
    return at::mv(value(one + "down_proj.weight"), inner);
  }
};

double difference(const at::Tensor& a, const at::Tensor& b) { return (a - b).abs().max().item<double>(); }
constexpr double kRounding = 1e-13;  // sums of a few dozen numbers of size 1 in float64

const Routing kSoftmax{.scores = Routing::Scores::kSoftmax, .normalised = true};
const Routing kGrouped{.scores = Routing::Scores::kSigmoid,
                       .wide = true,
                       .correction = true,
                       .groups = 4,
                       .chosen_groups = 2,
                       .normalised = true,
                       .sum_guard = 1e-20,
                       .scale = 2.5};

TEST(Experts, SoftmaxRoutingWeighsTheChosenByTheirShareOfAll) {
  for (const bool normalised : {false, true}) {
    Layer layer(spec_of({.scores = Routing::Scores::kSoftmax, .normalised = normalised}));
    const at::Tensor out_SD = layer.output();
    const at::Tensor share_SE = at::softmax(at::linear(layer.x_SD, layer.value("gate.weight")), -1);
    for (int64_t t = 0; t < kTokens; ++t) {
      const auto [best_k, chosen_k] = share_SE[t].topk(kChosen);
      const at::Tensor weights_k = normalised ? best_k / best_k.sum() : best_k;
      at::Tensor wanted_D = at::zeros({kHidden}, at::kDouble);
      for (int64_t j = 0; j < kChosen; ++j) wanted_D += weights_k[j] * layer.expert(chosen_k[j].item<int64_t>(), t);
      EXPECT_LE(difference(out_SD[t], wanted_D), kRounding) << "token " << t;
    }
  }
}

TEST(Experts, GraniteTakesTheSoftmaxOverTheChosenAlone) {
  Layer layer(spec_of({.scores = Routing::Scores::kSoftmaxOfChosen}));
  const at::Tensor out_SD = layer.output();
  const at::Tensor logits_SE = at::linear(layer.x_SD, layer.value("gate.weight"));
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto [best_k, chosen_k] = logits_SE[t].topk(kChosen);
    const at::Tensor weights_k = at::softmax(best_k, -1);
    at::Tensor wanted_D = at::zeros({kHidden}, at::kDouble);
    for (int64_t j = 0; j < kChosen; ++j) wanted_D += weights_k[j] * layer.expert(chosen_k[j].item<int64_t>(), t);
    EXPECT_LE(difference(out_SD[t], wanted_D), kRounding);
  }
}

TEST(Experts, GroupsAreRankedByTheirTwoBestCorrectedScores) {
  Layer layer(spec_of(kGrouped));
  layer.output();
  const at::Tensor corrected_SE =
      at::sigmoid(at::linear(layer.x_SD, layer.value("gate.weight"))) + layer.value("gate.e_score_correction_bias");
  const at::Tensor best_two_SG = corrected_SE.view({kTokens, 4, 2}).sum(-1);  // groups of two: all of them
  for (int64_t t = 0; t < kTokens; ++t) {
    const at::Tensor ranked = best_two_SG[t].argsort(/*dim=*/-1, /*descending=*/true);
    for (int64_t g = 0; g < 4; ++g) {
      const at::Tensor seen = layer.execution.choice_scores[t].narrow(0, 2 * ranked[g].item<int64_t>(), 2);
      if (g < 2) EXPECT_LE(difference(seen, corrected_SE[t].narrow(0, 2 * ranked[g].item<int64_t>(), 2)), kRounding);
      else EXPECT_TRUE(at::isneginf(seen).all().item<bool>());
    }
  }
}

TEST(Experts, OfEqualGroupsTheFirstAreChosen) {
  Layer layer(spec_of(kGrouped));
  {
    const at::NoGradGuard guard;
    parameter_of(layer.builder, "m.gate.weight").value.zero_();
    parameter_of(layer.builder, "m.gate.e_score_correction_bias").value.zero_();
  }
  layer.output();
  EXPECT_TRUE(at::isfinite(layer.execution.choice_scores.narrow(1, 0, 4)).all().item<bool>());
  EXPECT_TRUE(at::isneginf(layer.execution.choice_scores.narrow(1, 4, 4)).all().item<bool>());
}

TEST(Experts, TheCorrectionChoosesButDoesNotWeigh) {
  Layer layer(spec_of(kGrouped));
  const at::Tensor out_SD = layer.output();
  const at::Tensor score_SE = at::sigmoid(at::linear(layer.x_SD, layer.value("gate.weight")));
  bool mattered = false;
  for (int64_t t = 0; t < kTokens; ++t) {
    const at::Tensor chosen_k = layer.execution.choice_scores[t].argsort(-1, true).narrow(0, 0, kChosen);
    const at::Tensor weights_k = score_SE[t].index_select(0, chosen_k);
    at::Tensor wanted_D = at::zeros({kHidden}, at::kDouble);
    for (int64_t j = 0; j < kChosen; ++j) {
      wanted_D += 2.5 * weights_k[j] / weights_k.sum() * layer.expert(chosen_k[j].item<int64_t>(), t);
    }
    EXPECT_LE(difference(out_SD[t], wanted_D), kRounding);
    mattered |= !std::get<0>(chosen_k.sort()).equal(std::get<0>(std::get<1>(score_SE[t].topk(kChosen)).sort()));
  }
  EXPECT_TRUE(mattered) << "without a correction that changes a choice the test shows nothing";
}

TEST(Experts, GradientsComeThroughTheChosenScoresAlone) {
  Layer layer(spec_of(kGrouped));
  layer.output().square().sum().backward();
  EXPECT_FALSE(layer.execution.choice_scores.requires_grad());
  EXPECT_FALSE(layer.value("gate.e_score_correction_bias").grad().defined());
  // A nudge of the router's weight that changes no choice changes the loss by the gradient.
  at::Tensor& weight = parameter_of(layer.builder, "m.gate.weight").value;
  const at::Tensor grad = weight.grad(), step = at::randn_like(grad) * 1e-6;
  const auto loss = [&](double sign) {
    const at::NoGradGuard guard;
    const at::Tensor kept = weight.clone();
    weight.add_(sign * step);
    const double value = layer.output().square().sum().item<double>();
    weight.copy_(kept);
    return value;
  };
  const double measured = (loss(1) - loss(-1)) / 2, predicted = (grad * step).sum().item<double>();
  EXPECT_NEAR(measured / predicted, 1.0, 1e-5);
}

TEST(Experts, FusedWeightsAreTheSameExperts) {
  ExpertsSpec fused = spec_of(kSoftmax);
  fused.names.fused_input = "input_linear.weight";
  fused.names.fused_output = "output_linear.weight";
  Layer each(spec_of(kSoftmax)), all(fused);
  EXPECT_EQ(all.builder.parameters.size(), 3u);
  {
    const at::NoGradGuard guard;
    parameter_of(all.builder, "m.gate.weight").value.copy_(each.value("gate.weight"));
    for (int64_t e = 0; e < kExperts; ++e) {
      const std::string one = "experts." + std::to_string(e) + ".";
      all.value("input_linear.weight")[e].copy_(
          at::cat({each.value(one + "gate_proj.weight"), each.value(one + "up_proj.weight")}));
      all.value("output_linear.weight")[e].copy_(each.value(one + "down_proj.weight"));
    }
  }
  all.x_SD = each.x_SD;
  EXPECT_EQ(difference(each.output(), all.output()), 0.0);
}

TEST(Experts, EveryTokenPassesTheSharedExpertThroughItsGate) {
  ExpertsSpec gated = spec_of(kSoftmax);
  gated.shape.shared_width = 4;
  gated.names.shared = "shared_expert.";
  gated.names.shared_gate = "shared_expert_gate.weight";
  Layer layer(gated);
  const at::Tensor out_SD = layer.output();
  const auto project = [&](const char* name, const at::Tensor& x) { return at::linear(x, layer.value(name)); };
  const at::Tensor shared_SD =
      project("shared_expert.down_proj.weight", at::silu(project("shared_expert.gate_proj.weight", layer.x_SD)) *
                                                    project("shared_expert.up_proj.weight", layer.x_SD));
  {
    const at::NoGradGuard guard;
    layer.value("shared_expert.down_proj.weight").zero_();
  }
  const at::Tensor gate_S1 = at::sigmoid(project("shared_expert_gate.weight", layer.x_SD));
  EXPECT_LE(difference(out_SD - layer.output(), gate_S1 * shared_SD), kRounding);
  EXPECT_GT(shared_SD.abs().max().item<double>(), 0.1);
}

TEST(Experts, RoutedExpertsMayWorkInANarrowerSpace) {
  ExpertsSpec latent = spec_of(kGrouped);
  latent.shape.latent = 4;
  latent.shape.gated = false;
  latent.shape.activation = Activation::kRelu2;
  latent.bias = true;
  Layer layer(latent);
  EXPECT_THAT(parameter_of(layer.builder, "m.experts.0.up_proj.weight").shape, testing::ElementsAre(kWidth, 4));
  EXPECT_THAT(parameter_of(layer.builder, "m.fc2_latent_proj.bias").shape, testing::ElementsAre(kHidden));
  const at::Tensor out_SD = layer.output();
  EXPECT_THAT(out_SD.sizes().vec(), testing::ElementsAre(kTokens, kHidden));
  // relu² of a bias alone is left where the experts' input is projected to nothing.
  const at::NoGradGuard guard;
  layer.value("fc1_latent_proj.weight").zero_();
  layer.value("fc1_latent_proj.bias").zero_();
  EXPECT_LE(difference(layer.output(), layer.value("fc2_latent_proj.bias").expand_as(out_SD)), kRounding);
}

TEST(Experts, LogitsAndWeightsHaveTheDtypesOfTransformers) {
  // Wide routing of a bfloat16 model: no rounding between the product and the weights.
  Layer wide(spec_of(kGrouped), 1, at::kBFloat16);
  wide.output();
  const at::Tensor exact_SE = at::sigmoid(at::linear(wide.x_SD.to(at::kFloat), wide.value("gate.weight").to(at::kFloat)));
  const at::Tensor finite = at::isfinite(wide.execution.choice_scores);
  const at::Tensor wanted = exact_SE + wide.value("gate.e_score_correction_bias").to(at::kFloat);
  EXPECT_EQ(wide.execution.choice_scores.scalar_type(), at::kFloat);
  EXPECT_EQ(difference(wide.execution.choice_scores.masked_select(finite), wanted.masked_select(finite)), 0.0);

  Layer narrow(spec_of(kSoftmax), 1, at::kBFloat16);
  narrow.output();
  const at::Tensor rounded_SE = at::softmax(at::linear(narrow.x_SD, narrow.value("gate.weight")), -1, at::kFloat);
  EXPECT_EQ(difference(narrow.execution.choice_scores, rounded_SE), 0.0);
}

}  // namespace
}  // namespace longstraw::core::model
