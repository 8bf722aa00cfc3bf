// config.json of the families with Mamba-2 mixers: defaults of transformers' classes, older spellings, multipliers, refusals.
#include "core/model/checkpoint.h"
#include "tests/model/config_reading.h"

#include <cmath>
#include <fstream>
#include <limits>

namespace longstraw::core::model {
namespace {

using nlohmann::json;
using testing::ElementsAre;

const json kSizes{
    {"vocab_size", 64}, {"hidden_size", 4096}, {"num_hidden_layers", 4}, {"num_attention_heads", 32}, {"intermediate_size", 96}};
json family(const std::string& model_type, const json& changes = json::object()) {
  return merged(merged(kSizes, {{"model_type", model_type}}), changes);
}
json nemotron(const json& changes = json::object()) { return merged(without(family("nemotron_h"), "num_hidden_layers"), changes); }

template <class Shape>
std::vector<Shape> shapes(const DecoderParts& parts) {
  std::vector<Shape> found;
  for (const Layer& layer : parts.layers) {
    for (const Residual& residual : layer.residuals) {
      for (const auto& block : residual.blocks) {
        const BlockShape shape = block->shape();
        if (const auto* one = std::get_if<Shape>(&shape)) found.push_back(*one);
      }
    }
  }
  return found;
}

std::vector<std::string> state_kinds(const DecoderParts& parts) {
  std::vector<std::string> kinds;
  for (const MixerState& state : parts.builder.states) kinds.push_back(state.kind);
  return kinds;
}

TEST(Mamba2Config, TakesTheDefaultsOfTransformers) {
  const DecoderParts parts = read_config(family("mamba2"));
  const auto mixers = shapes<StateSpaceShape>(parts);
  ASSERT_EQ(mixers.size(), 4);
  const StateSpaceShape& mixer = mixers.front();
  EXPECT_THAT((std::vector{mixer.heads, mixer.head_dim, mixer.groups, mixer.state, mixer.kernel}), ElementsAre(128, 64, 8, 128, 4));
  EXPECT_TRUE(mixer.convolution_bias);
  EXPECT_FALSE(mixer.input_bias || mixer.output_bias);
  EXPECT_EQ(mixer.time_step_min, 0.0);
  EXPECT_TRUE(std::isinf(mixer.time_step_max));
  EXPECT_EQ(mixer.norm, StateSpaceShape::Norm::kWhole) << "over all groups";
  EXPECT_EQ(parts.final_norm.eps, 1e-5);
  EXPECT_TRUE(parts.layers[0].residuals[0].wide);
  EXPECT_FALSE(read_config(family("mamba2", {{"residual_in_fp32", false}})).layers[0].residuals[0].wide);
  EXPECT_EQ(parts.architecture.rotary.dims, 0);
}

TEST(Mamba2Config, DeclaresTheStateOfItsMixers) {
  const MixerState state = read_config(family("mamba2")).builder.states.at(1);
  EXPECT_EQ(state.layer, 1);
  EXPECT_TRUE(state.rows.empty());
  ASSERT_EQ(state.carried.size(), 2);
  EXPECT_THAT(state.carried[0].shape, ElementsAre(8192 + 2 * 8 * 128, 3)) << "columns before the convolution: K - 1";
  EXPECT_FALSE(state.carried[0].wide);
  EXPECT_THAT(state.carried[1].shape, ElementsAre(128, 64, 128));
  EXPECT_TRUE(state.carried[1].wide);
}

TEST(Mamba2Config, ReadsInfinityHoweverItIsSpelt) {
  const test::TemporaryFolder folder;
  const auto limits = [&](const std::string& spelt) {
    json config = family("mamba2", {{"note", R"(a string with "Infinity, -Infinity, NaN" \ in it)"}, {"time_step_limit", "HERE"}});
    const std::string text = config.dump();
    const size_t here = text.find("\"HERE\"");
    std::ofstream(folder.path() / "config.json") << text.substr(0, here) << spelt << text.substr(here + 6);
    const auto mixer = shapes<StateSpaceShape>(read_parts(folder.path())).front();
    return std::pair(mixer.time_step_min, mixer.time_step_max);
  };
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(limits("[0.0, Infinity]"), std::pair(0.0, kInfinity)) << "as Python writes it";
  EXPECT_EQ(limits(R"([-Infinity, {"__float__": "Infinity"}])"), std::pair(-kInfinity, kInfinity));
  EXPECT_EQ(limits("null"), std::pair(0.0, kInfinity));
  EXPECT_EQ(limits("[0.25, 0.5]"), std::pair(0.25, 0.5));
  EXPECT_THROW(limits("[0.0, NaN]"), FormatError);
  EXPECT_THROW(limits("[0.0, infinity]"), FormatError);
}

TEST(Mamba2Config, RefusesByName) {
  expect_refused(family("mamba2", {{"num_heads", 64}}), {"num_heads", "64", "8192"});
  expect_refused(family("mamba2", {{"n_groups", 3}}), {"n_groups", "3", "divisor of the 128 heads"});
  expect_refused(family("mamba2", {{"hidden_act", "gelu"}}), {"hidden_act", "gelu"});
  expect_refused(family("mamba2", {{"time_step_limit", {0.5, 0.25}}}), {"time_step_limit", "[0.5,0.25]", "least"});
  expect_refused(family("mamba2", {{"time_step_limit", {0.5}}}), {"time_step_limit"});
  expect_refused(family("mamba2", {{"state_size", 0}}), {"state_size", "0", "whole number > 0"});
  expect_refused(without(family("mamba2"), "hidden_size"), {"hidden_size", "nothing"});
}

TEST(NemotronConfig, KnowsItsLayersInEverySpelling) {
  const auto wanted = ElementsAre("mamba-2", "full attention", "mamba-2");
  const json types{"linear_attention", "moe", "full_attention", "mlp", "linear_attention"};
  EXPECT_THAT(state_kinds(read_config(nemotron({{"layers_block_type", types}}))), wanted);
  EXPECT_THAT(state_kinds(read_config(nemotron({{"layer_types", {"mamba", "moe", "attention", "mlp", "mamba"}}}))), wanted);
  const DecoderParts parts = read_config(nemotron({{"hybrid_override_pattern", "ME*-M"}}));
  EXPECT_THAT(state_kinds(parts), wanted);
  EXPECT_EQ(parts.builder.states[1].layer, 2);
  EXPECT_EQ(shapes<MlpShape>(parts).size(), 1);
  EXPECT_EQ(shapes<ExpertsShape>(parts).size(), 1);
  EXPECT_EQ(read_config(nemotron({{"layers_block_type", types}, {"hybrid_override_pattern", "M"}})).layers.size(), 5)
      << "the list counts";
  EXPECT_EQ(read_config(nemotron({{"hybrid_override_pattern", "M*"}, {"num_hidden_layers", 99}})).architecture.layers, 2);
  EXPECT_EQ(read_config(nemotron()).architecture.layers, 4) << "the class's default";
  expect_refused(nemotron({{"hybrid_override_pattern", "MX"}}), {"hybrid_override_pattern", "MX"});
  expect_refused(nemotron({{"layers_block_type", {"conv"}}}), {"layers_block_type", "conv"});
}

TEST(NemotronConfig, TakesTheDefaultsOfTransformers) {
  const DecoderParts parts = read_config(without(nemotron(), "intermediate_size"));
  const StateSpaceShape mixer = shapes<StateSpaceShape>(parts).front();
  EXPECT_THAT((std::vector{mixer.heads, mixer.head_dim, mixer.groups, mixer.state}), ElementsAre(128, 64, 8, 128));
  EXPECT_EQ(mixer.norm, StateSpaceShape::Norm::kGroups);
  EXPECT_EQ(mixer.time_step_min, 0.001) << "not time_step_limit, which the class does not read";
  const AttentionShape attention = shapes<AttentionShape>(parts).front();
  EXPECT_THAT((std::vector{attention.heads, attention.kv_heads, attention.head_dim}), ElementsAre(32, 8, 128));
  EXPECT_FALSE(attention.rotary);
  const MlpShape mlp = shapes<MlpShape>(parts).front();
  EXPECT_EQ(mlp.width, 21504);
  EXPECT_EQ(mlp.activation, Activation::kRelu2);
  EXPECT_FALSE(mlp.gated);
  const ExpertsShape experts = shapes<ExpertsShape>(parts).front();
  EXPECT_THAT((std::vector{experts.experts, experts.chosen, experts.width, experts.shared_width, experts.latent}),
              ElementsAre(8, 2, 7688, 7688, 0));
  EXPECT_EQ(parts.output->name, "lm_head.weight");
  EXPECT_EQ(parts.final_norm.eps, 1e-5);
}

TEST(NemotronConfig, PutsExpertsIntoALatentSpace) {
  const DecoderParts parts = read_config(nemotron({{"moe_latent_size", 128}, {"hybrid_override_pattern", "E"}}));
  EXPECT_THAT(find_parameter(parts, "backbone.layers.0.mixer.fc1_latent_proj.weight")->shape, ElementsAre(128, 4096));
  EXPECT_THAT(find_parameter(parts, "backbone.layers.0.mixer.experts.7.up_proj.weight")->shape, ElementsAre(7688, 128));
  EXPECT_THAT(find_parameter(parts, "backbone.layers.0.mixer.shared_experts.up_proj.weight")->shape, ElementsAre(7688, 4096));
}

TEST(NemotronConfig, LetsOlderKeysWin) {
  const auto mixer =
      shapes<StateSpaceShape>(
          read_config(nemotron(
              {{"mamba_n_groups", 4}, {"n_groups", 2}, {"mamba_d_conv", 3}, {"mamba_dt_min", 0.5}, {"mamba_conv_bias", false}})))
          .front();
  EXPECT_EQ(mixer.groups, 4);
  EXPECT_EQ(mixer.kernel, 3);
  EXPECT_EQ(mixer.time_step_min, 0.5);
  EXPECT_FALSE(mixer.convolution_bias);
}

TEST(NemotronConfig, RefusesByName) {
  expect_refused(nemotron({{"tie_word_embeddings", true}}), {"tie_word_embeddings"});
  expect_refused(nemotron({{"attention_bias", true}}), {"attention_bias"});
  expect_refused(nemotron({{"sliding_window", 128}}), {"sliding_window", "128"});
  expect_refused(nemotron({{"mlp_hidden_act", "gelu"}}), {"mlp_hidden_act", "gelu", "relu2"});
  expect_refused(nemotron({{"num_experts_per_tok", 9}}), {"num_experts_per_tok", "9", "8"});
  expect_refused(nemotron({{"mamba_n_groups", 3}}), {"mamba_n_groups", "3"});
}

TEST(BambaConfig, HasAttentionWhereItSaysAndHalfOfEachHeadRotated) {
  EXPECT_THAT(state_kinds(read_config(family("bamba", {{"attn_layer_indices", {1, 3}}}))),
              ElementsAre("mamba-2", "full attention", "mamba-2", "full attention"));
  EXPECT_THAT(state_kinds(read_config(family("bamba", {{"attn_layer_indices", nullptr}}))),
              ElementsAre("mamba-2", "mamba-2", "mamba-2", "mamba-2"));
  const DecoderParts parts = read_config(family("bamba"));
  EXPECT_EQ(parts.architecture.rotary.dims, 64) << "of 128";
  EXPECT_EQ(read_config(family("bamba", {{"rope_parameters", {{"rope_type", "default"}, {"partial_rotary_factor", 0.25}}}}))
                .architecture.rotary.dims,
            32);
  const StateSpaceShape mixer = shapes<StateSpaceShape>(parts).front();
  EXPECT_THAT((std::vector{mixer.heads, mixer.head_dim, mixer.groups, mixer.state}), ElementsAre(128, 64, 1, 256));
  EXPECT_EQ(parts.final_norm.weight->name, "model.final_layernorm.weight");
  EXPECT_EQ(parts.architecture.kv_heads, 8);
  expect_refused(family("bamba", {{"attn_layer_indices", {4}}}), {"attn_layer_indices", "[4]", "num_hidden_layers (4)"});
  expect_refused(family("bamba", {{"mamba_d_head", 32}}), {"mamba_d_head", "32", "auto"});
  expect_refused(family("bamba", {{"mamba_n_heads", 100}}), {"mamba_n_heads", "100", "8192"});
}

TEST(GraniteConfig, ReadsItsMultipliers) {
  const DecoderParts parts = read_config(family("granitemoehybrid", {{"layer_types", {"mamba", "attention", "mamba", "mamba"}},
                                                                     {"embedding_multiplier", 12},
                                                                     {"residual_multiplier", 0.22},
                                                                     {"attention_multiplier", 0.0078125},
                                                                     {"logits_scaling", 8}}));
  EXPECT_EQ(parts.embedding_multiplier, 12.0);
  EXPECT_EQ(parts.logit_multiplier, 0.125);
  for (const Layer& layer : parts.layers) {
    for (const Residual& residual : layer.residuals) EXPECT_EQ(residual.multiplier, 0.22);
  }
  EXPECT_THAT(state_kinds(parts), ElementsAre("mamba-2", "full attention", "mamba-2", "mamba-2"));
  EXPECT_EQ(shapes<AttentionShape>(parts).front().scale, 0.0078125);
}

TEST(GraniteConfig, RotatesOnlyWithRope) {
  const json attention{{"layer_types", {"full_attention", "full_attention", "full_attention", "full_attention"}}};
  for (const json& type : {json("nope"), json(nullptr)}) {
    const DecoderParts parts = read_config(family("granitemoehybrid", merged(attention, {{"position_embedding_type", type}})));
    EXPECT_FALSE(shapes<AttentionShape>(parts).front().rotary);
    EXPECT_EQ(parts.architecture.rotary.dims, 0);
  }
  const DecoderParts parts = read_config(family("granitemoehybrid", merged(attention, {{"position_embedding_type", "rope"}})));
  EXPECT_TRUE(shapes<AttentionShape>(parts).front().rotary);
  EXPECT_EQ(parts.architecture.rotary.dims, 128);
  expect_refused(family("granitemoehybrid", {{"position_embedding_type", "alibi"}}), {"position_embedding_type", "alibi"});
}

TEST(GraniteConfig, MayHaveNoExperts) {
  const DecoderParts dense = read_config(family("granitemoehybrid", {{"num_local_experts", 0}}));
  EXPECT_TRUE(dense.builder.routers.empty());
  EXPECT_TRUE(shapes<ExpertsShape>(dense).empty());
  const DecoderParts sparse = read_config(family("granitemoehybrid"));
  EXPECT_EQ(sparse.builder.routers.size(), 4);
  EXPECT_THAT(find_parameter(sparse, "model.layers.3.block_sparse_moe.input_linear.weight")->shape, ElementsAre(8, 192, 4096));
  EXPECT_THAT(find_parameter(sparse, "model.layers.3.shared_mlp.input_linear.weight")->shape, ElementsAre(2048, 4096));
  expect_refused(family("granitemoehybrid", {{"num_local_experts", -1}}), {"num_local_experts", "-1"});
  expect_refused(family("granitemoehybrid", {{"layer_types", {"mamba"}}}), {"layer_types", "4 entries"});
}

TEST(FalconConfig, HasBothMixersSideBySide) {
  const DecoderParts parts = read_config(family("falcon_h1"));
  ASSERT_EQ(parts.layers[0].residuals[0].blocks.size(), 2);
  EXPECT_THAT(state_kinds(read_config(family("falcon_h1", {{"num_hidden_layers", 1}}))), ElementsAre("mamba-2", "full attention"));
  EXPECT_EQ(find_parameter(parts, "model.layers.0.mamba.norm.weight"), nullptr) << "a norm only with mamba_rms_norm";
  const DecoderParts normed = read_config(family("falcon_h1", {{"mamba_rms_norm", true}}));
  EXPECT_NE(find_parameter(normed, "model.layers.0.mamba.norm.weight"), nullptr);
  EXPECT_TRUE(shapes<StateSpaceShape>(normed).front().norm_before_gate);
}

TEST(FalconConfig, TellsNullFromMissing) {
  const auto width = [](const json& changes) {
    const auto mixer = shapes<StateSpaceShape>(read_config(family("falcon_h1", changes))).front();
    return mixer.heads * mixer.head_dim;
  };
  EXPECT_EQ(width(json::object()), 1024) << "the class's default";
  EXPECT_EQ(width({{"mamba_d_ssm", nullptr}}), 8192) << "expand times hidden_size";
  EXPECT_EQ(width({{"mamba_d_ssm", 512}}), 512);
}

TEST(FalconConfig, ReadsItsMultipliers) {
  const DecoderParts parts = read_config(family("falcon_h1", {{"embedding_multiplier", 2.5},
                                                              {"lm_head_multiplier", 0.5},
                                                              {"mlp_multipliers", {0.75, 0.625}},
                                                              {"key_multiplier", 0.375},
                                                              {"attention_in_multiplier", 1.5},
                                                              {"attention_out_multiplier", 1.25},
                                                              {"ssm_in_multiplier", 3.0},
                                                              {"ssm_out_multiplier", 0.125},
                                                              {"ssm_multipliers", {1, 2, 3, 4, 5}}}));
  EXPECT_EQ(parts.embedding_multiplier, 2.5);
  EXPECT_EQ(parts.logit_multiplier, 0.5);
  const MlpShape mlp = shapes<MlpShape>(parts).front();
  EXPECT_EQ(std::pair(mlp.gate_multiplier, mlp.output_multiplier), std::pair(0.75, 0.625));
  const AttentionShape attention = shapes<AttentionShape>(parts).front();
  EXPECT_EQ(attention.key_multiplier, 0.375);
  EXPECT_EQ(std::pair(attention.input_multiplier, attention.output_multiplier), std::pair(1.5, 1.25));
  const StateSpaceShape mixer = shapes<StateSpaceShape>(parts).front();
  EXPECT_EQ(std::pair(mixer.input_multiplier, mixer.output_multiplier), std::pair(3.0, 0.125));
  EXPECT_THAT(mixer.projection_multipliers, ElementsAre(1, 2, 3, 4, 5));
  expect_refused(family("falcon_h1", {{"ssm_multipliers", {1, 2, 3, 4}}}), {"ssm_multipliers", "5 numbers"});
  expect_refused(family("falcon_h1", {{"mlp_multipliers", "wide"}}), {"mlp_multipliers", "wide"});
}

TEST(MambaFamilies, DeclareTheTensorsOfTheirCheckpoints) {
  for (const std::string variant :
       {"mamba2", "mamba2_tied", "nemotron_h", "nemotron_h_moe", "nemotron_h_latent", "bamba", "falcon_h1", "falcon_h1_norm",
        "falcon_h1_norm_first", "granitemoehybrid", "granitemoehybrid_dense"}) {
    const DecoderParts parts = read_parts(test::golden_folder(variant));
    const Checkpoint checkpoint(test::golden_folder(variant));
    EXPECT_EQ(parts.builder.parameters.size(), checkpoint.tensors().size()) << variant;
    for (const auto& parameter : parts.builder.parameters) {
      ASSERT_TRUE(checkpoint.tensors().contains(parameter->name)) << variant << ": " << parameter->name;
      EXPECT_EQ(checkpoint.tensors().at(parameter->name).tensor->shape, parameter->shape) << variant << ": " << parameter->name;
    }
  }
}

}  // namespace
}  // namespace longstraw::core::model
