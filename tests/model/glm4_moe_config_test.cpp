// config.json of GLM-4.5 and its like: defaults, grouped routing, and the published models.
#include "tests/model/config_reading.h"

namespace longstraw::core::model {
namespace {

using nlohmann::json;

json minimal() {
  return {
      {"model_type", "glm4_moe"}, {"num_hidden_layers", 3}, {"hidden_size", 64}, {"num_attention_heads", 8}, {"vocab_size", 32}};
}

TEST(Glm4MoeConfig, TakesTheDefaultsOfTransformers) {
  const DecoderParts parts = read_config(minimal());
  const Architecture& a = parts.architecture;
  EXPECT_EQ(a.kv_heads, 8);
  EXPECT_EQ(a.head_dim, 8) << "hidden / heads: the class has no default";
  EXPECT_EQ(a.norm_eps, 1e-5);
  EXPECT_EQ(a.rotary.dims, 4) << "half of the head";
  EXPECT_EQ(a.rotary.max_positions, 131072);
  EXPECT_FALSE(a.query_key_norm || a.query_key_value_bias || a.attention_output_bias);
  EXPECT_EQ(parts.builder.routers.size(), 2u) << "the first layer is dense";
  const auto experts = std::get<ExpertsShape>(parts.layers[1].residuals[1].blocks[0]->shape());
  EXPECT_EQ(experts.experts, 128);
  EXPECT_EQ(experts.chosen, 8);
  EXPECT_EQ(experts.width, 1408);
  EXPECT_EQ(experts.shared_width, 1408);
  const Parameter* correction = find_parameter(parts, "model.layers.1.mlp.gate.e_score_correction_bias");
  ASSERT_NE(correction, nullptr);
  EXPECT_FALSE(correction->trained);
}

TEST(Glm4MoeConfig, DenseLayersAndSharedExpertsMayBeNone) {
  const DecoderParts sparse = read_config(merged(minimal(), {{"first_k_dense_replace", 0}, {"n_shared_experts", 0}}));
  EXPECT_EQ(sparse.builder.routers.size(), 3u);
  EXPECT_EQ(find_parameter(sparse, "model.layers.0.mlp.shared_experts.up_proj.weight"), nullptr);
  EXPECT_NE(find_parameter(sparse, "model.layers.0.mlp.experts.127.down_proj.weight"), nullptr);
  const DecoderParts dense = read_config(merged(minimal(), {{"first_k_dense_replace", 99}}));
  EXPECT_TRUE(dense.builder.routers.empty());
  expect_refused(merged(minimal(), {{"first_k_dense_replace", -1}}), {"first_k_dense_replace", "-1"});
}

TEST(Glm4MoeConfig, AttentionHasABiasOnlyBeforeIt) {
  const DecoderParts parts = read_config(merged(minimal(), {{"attention_bias", true}, {"use_qk_norm", true}}));
  EXPECT_NE(find_parameter(parts, "model.layers.0.self_attn.v_proj.bias"), nullptr);
  EXPECT_EQ(find_parameter(parts, "model.layers.0.self_attn.o_proj.bias"), nullptr);
  EXPECT_NE(find_parameter(parts, "model.layers.0.self_attn.k_norm.weight"), nullptr);
}

TEST(Glm4MoeConfig, GroupsThatCanNotBeChosenFromAreRefused) {
  const json grouped = merged(minimal(), {{"n_routed_experts", 8}, {"num_experts_per_tok", 3}, {"n_group", 4}, {"topk_group", 2}});
  EXPECT_EQ(read_config(grouped).builder.routers.size(), 2u);
  expect_refused(merged(grouped, {{"n_group", 3}}), {"n_group", "got 3", "8 experts"});
  expect_refused(merged(grouped, {{"n_group", 8}}), {"n_group", "got 8", "two"});
  expect_refused(merged(grouped, {{"topk_group", 5}}), {"topk_group", "got 5", "n_group (4)"});
  expect_refused(merged(grouped, {{"topk_group", 1}}), {"topk_group", "got 1", "3 experts"});
  expect_refused(merged(grouped, {{"num_experts_per_tok", 9}}), {"num_experts_per_tok", "got 9", "(8)"});
}

TEST(Glm4MoeConfig, TheLayerForFurtherTokensIsSkipped) {
  Architecture a;
  a.layers = 46;
  EXPECT_THAT(family_of("glm4_moe", "config.json").layout(a).skipped, testing::ElementsAre("model.layers.46."));
}

// Numbers of transformers' own model of the same configuration, its routing constants counted.
TEST(Glm4MoeConfig, PublishedModelsHaveTheirSize) {
  const json air = merged(minimal(), {{"num_hidden_layers", 46},
                                      {"hidden_size", 4096},
                                      {"num_attention_heads", 96},
                                      {"head_dim", 128},
                                      {"intermediate_size", 10944},
                                      {"attention_bias", true},
                                      {"vocab_size", 151552}});
  EXPECT_EQ(sums_of(read_config(air)).parameters, 106'852'245'504 + 45 * 128);
  const json glm_4_6 = merged(air, {{"num_hidden_layers", 92},
                                    {"hidden_size", 5120},
                                    {"intermediate_size", 12288},
                                    {"moe_intermediate_size", 1536},
                                    {"n_routed_experts", 160},
                                    {"first_k_dense_replace", 3},
                                    {"routed_scaling_factor", 2.5},
                                    {"use_qk_norm", true}});
  EXPECT_EQ(sums_of(read_config(glm_4_6)).parameters, 352'797'814'784 + 89 * 160);
  EXPECT_EQ(sums_of(read_config(glm_4_6)).state_bytes_per_token, 92 * 2 * 2 * 8 * 128);
}

}  // namespace
}  // namespace longstraw::core::model
