// The gated delta rule's block: both layouts of its projections, what it asks of an execution, and in which dtypes.
#include "core/model/blocks/delta_rule.h"

#include "tests/model/plain_execution.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace longstraw::core::model {
namespace {

using testing::ElementsAre;

constexpr int64_t kHidden = 10, kTokens = 9;
const DeltaRuleShape kShape{.key_heads = 2, .value_heads = 6, .key_dim = 3, .value_dim = 4, .kernel = 4};

struct Layer {
  Builder builder;
  std::unique_ptr<DeltaRuleBlock> block;
  PlainExecution execution;

  Layer(bool fused, at::ScalarType dtype) {
    DeltaRuleShape shape = kShape;
    shape.fused_projections = fused;
    block = std::make_unique<DeltaRuleBlock>(builder, "m.", /*layer=*/5, kHidden, 1e-6, shape);
    fill(builder, dtype, 3);
  }
  at::Tensor& value(const std::string& name) { return parameter_of(builder, "m." + name).value; }
};

at::Tensor tokens(at::ScalarType dtype) {
  at::manual_seed(17);
  return at::randn({kTokens, kHidden}, at::kDouble).to(dtype);
}

// The rows of Qwen3-Next's two matrices, taken from those of the plain layout: by key head [q | k | its v | its z] and
// [its b | its a].
void copy_into_fused(Layer& plain, Layer& fused) {
  const at::NoGradGuard guard;
  const int64_t heads = kShape.key_heads, keys = heads * kShape.key_dim, shared = kShape.value_heads / heads;
  const int64_t own_values = shared * kShape.value_dim;
  std::vector<at::Tensor> qkvz, ba;
  for (int64_t g = 0; g < heads; ++g) {
    const at::Tensor qkv = plain.value("in_proj_qkv.weight");
    qkvz.push_back(qkv.narrow(0, g * kShape.key_dim, kShape.key_dim));
    qkvz.push_back(qkv.narrow(0, keys + g * kShape.key_dim, kShape.key_dim));
    qkvz.push_back(qkv.narrow(0, 2 * keys + g * own_values, own_values));
    qkvz.push_back(plain.value("in_proj_z.weight").narrow(0, g * own_values, own_values));
    ba.push_back(plain.value("in_proj_b.weight").narrow(0, g * shared, shared));
    ba.push_back(plain.value("in_proj_a.weight").narrow(0, g * shared, shared));
  }
  fused.value("in_proj_qkvz.weight").copy_(at::cat(qkvz));
  fused.value("in_proj_ba.weight").copy_(at::cat(ba));
  for (const char* name : {"conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight"}) {
    fused.value(name).copy_(plain.value(name));
  }
}

TEST(DeltaRuleBlock, BothLayoutsOfTheProjectionsAreOneModel) {
  Layer plain(false, at::kDouble), fused(true, at::kDouble);
  copy_into_fused(plain, fused);
  const at::Tensor x_SD = tokens(at::kDouble);
  const at::Tensor a = plain.block->output(x_SD, {}, plain.execution), b = fused.block->output(x_SD, {}, fused.execution);
  EXPECT_THAT(a.sizes().vec(), ElementsAre(kTokens, kHidden));
  EXPECT_LE((a - b).abs().max().item<double>(), 1e-13);
  EXPECT_GT(a.abs().max().item<double>(), 1e-2);
}

TEST(DeltaRuleBlock, GatesAreThoseOfTheEquations) {
  Layer layer(false, at::kDouble);
  const at::Tensor x_SD = tokens(at::kDouble);
  layer.block->output(x_SD, {}, layer.execution);
  const at::Tensor a_SH = at::linear(x_SD, layer.value("in_proj_a.weight")) + layer.value("dt_bias");
  const at::Tensor wanted_SH = -layer.value("A_log").exp() * at::log1p(a_SH.exp());
  EXPECT_LE((layer.execution.log_decay - wanted_SH).abs().max().item<double>(), 1e-13);
  EXPECT_TRUE((layer.execution.log_decay < 0).all().item<bool>());
  const at::Tensor beta_SH = 1 / (1 + (-at::linear(x_SD, layer.value("in_proj_b.weight"))).exp());
  EXPECT_LE((layer.execution.beta - beta_SH).abs().max().item<double>(), 1e-14);
  EXPECT_THAT(layer.execution.query.sizes().vec(), ElementsAre(kTokens, 2, 3));
  EXPECT_THAT(layer.execution.value_.sizes().vec(), ElementsAre(kTokens, 6, 4));
}

TEST(DeltaRuleBlock, TheStateIsMadeWithoutTheOutput) {
  for (const bool fused : {false, true}) {
    Layer whole(fused, at::kDouble), state_only(fused, at::kDouble);
    const at::Tensor x_SD = tokens(at::kDouble);
    whole.block->output(x_SD, {}, whole.execution);
    state_only.block->state(x_SD, {}, state_only.execution);
    EXPECT_EQ(state_only.execution.convolutions, 1);
    EXPECT_EQ(state_only.execution.rules, 1);
    EXPECT_TRUE(state_only.execution.key.equal(whole.execution.key));
    EXPECT_TRUE(state_only.execution.log_decay.equal(whole.execution.log_decay));
    if (fused) EXPECT_THAT(state_only.execution.projections, ElementsAre("m.in_proj_qkvz.weight", "m.in_proj_ba.weight"));
    else {
      EXPECT_THAT(state_only.execution.projections,
                  ElementsAre("m.in_proj_qkv.weight", "m.in_proj_b.weight", "m.in_proj_a.weight"));
    }
    EXPECT_EQ(whole.execution.projections.back(), "m.out_proj.weight");
  }
}

TEST(DeltaRuleBlock, DeclaresWhatItLeavesForLaterTokens) {
  const Layer layer(true, at::kDouble);
  ASSERT_EQ(layer.builder.states.size(), 1u);
  const MixerState& state = layer.builder.states[0];
  EXPECT_EQ(state.layer, 5);
  EXPECT_TRUE(state.rows.empty());
  ASSERT_EQ(state.carried.size(), 2u);
  EXPECT_EQ(state.carried[0].name, "convolution");
  EXPECT_THAT(state.carried[0].shape, ElementsAre(2 * 2 * 3 + 6 * 4, 3));
  EXPECT_FALSE(state.carried[0].wide);
  EXPECT_EQ(state.carried[1].name, "recurrent");
  EXPECT_THAT(state.carried[1].shape, ElementsAre(6, 3, 4));
  EXPECT_TRUE(state.carried[1].wide);
}

// Where transformers casts, we cast: the decay and the last product wide, beta rounded before it is widened, q, k and v not
// widened before the rule.
TEST(DeltaRuleBlock, DtypesOfABfloat16ModelAreThoseOfTransformers) {
  Layer layer(false, at::kBFloat16);
  const at::Tensor x_SD = tokens(at::kBFloat16);
  const at::Tensor out_SD = layer.block->output(x_SD, {}, layer.execution);
  EXPECT_EQ(out_SD.scalar_type(), at::kBFloat16);
  EXPECT_EQ(layer.execution.query.scalar_type(), at::kBFloat16);
  EXPECT_EQ(layer.execution.log_decay.scalar_type(), at::kFloat);
  EXPECT_EQ(layer.execution.beta.scalar_type(), at::kFloat);
  EXPECT_TRUE(layer.execution.beta.equal(at::sigmoid(at::linear(x_SD, layer.value("in_proj_b.weight"))).to(at::kFloat)));
  const at::Tensor a_SH = at::linear(x_SD, layer.value("in_proj_a.weight")).to(at::kFloat) + layer.value("dt_bias").to(at::kFloat);
  EXPECT_TRUE(layer.execution.log_decay.equal(-layer.value("A_log").to(at::kFloat).exp() * at::softplus(a_SH)));
}

}  // namespace
}  // namespace longstraw::core::model
