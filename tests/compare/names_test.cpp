#include <gtest/gtest.h>

#include "compare/names.h"

namespace longstraw::compare {
namespace {

TEST(Names, LayerIsTheNumberAfterLayers) {
  EXPECT_EQ(layer_of("model.layers.12.self_attn.q_proj.weight"), 12);
  EXPECT_EQ(layer_of("backbone.layers.0.norm.weight"), 0);
  EXPECT_EQ(layer_of("model.language_model.layers.7.mlp.gate.weight"), 7);
  EXPECT_EQ(layer_of("model.layers.3.mlp.experts.11.gate_proj.weight"), 3);
  EXPECT_EQ(layer_of("model.norm.weight"), std::nullopt);
  EXPECT_EQ(layer_of("model.layers.weight"), std::nullopt);
  EXPECT_EQ(layer_of("model.sublayers.3.weight"), std::nullopt);
  EXPECT_EQ(layer_of("model.layers.3"), std::nullopt);
  EXPECT_EQ(layer_of("model.layers.99999999999999999999.w"), std::nullopt);
}

TEST(Names, KindIsTheNameWithoutNumbers) {
  EXPECT_EQ(kind_of("model.layers.12.self_attn.q_proj.weight"), "self_attn.q_proj.weight");
  EXPECT_EQ(kind_of("model.layers.3.mlp.experts.11.gate_proj.weight"), "mlp.experts.gate_proj.weight");
  EXPECT_EQ(kind_of("model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(kind_of("lm_head.weight"), "lm_head.weight");
}

TEST(Names, NamesOfEveryFamilyFallIntoKinds) {
  EXPECT_EQ(kind_of("model.language_model.layers.7.mlp.experts.gate_up_proj"), "mlp.experts.gate_up_proj");
  EXPECT_EQ(kind_of("backbone.layers.4.mixer.experts.3.up_proj.weight"), "mixer.experts.up_proj.weight");
  EXPECT_EQ(kind_of("model.layers.1.block_sparse_moe.router.layer.weight"), "block_sparse_moe.router.layer.weight");
  EXPECT_EQ(kind_of("model.layers.9.self_attn.indexer.k_norm.bias"), "self_attn.indexer.k_norm.bias");
  EXPECT_EQ(kind_of("model.layers.0.mamba.conv1d.weight"), "mamba.conv1d.weight");
}

TEST(Names, ExpertIsTheNumberAfterExperts) {
  EXPECT_EQ(expert_of("model.layers.3.mlp.experts.11.gate_proj.weight"), 11);
  EXPECT_EQ(expert_of("backbone.layers.4.mixer.experts.0.up_proj.weight"), 0);
  EXPECT_EQ(expert_of("model.layers.3.mlp.experts.gate_up_proj"), std::nullopt);
  EXPECT_EQ(expert_of("model.layers.3.mlp.shared_experts.up_proj.weight"), std::nullopt);
}

TEST(Names, RoutedIsWhatOnlySomeTokensPass) {
  for (const char* kind : {"mlp.experts.up_proj.weight", "mlp.gate.weight", "mixer.gate.weight", "mixer.experts.down_proj.weight",
                           "block_sparse_moe.input_linear.weight", "block_sparse_moe.router.layer.weight"}) {
    EXPECT_TRUE(is_routed(kind)) << kind;
  }
  for (const char* kind : {"mlp.shared_experts.up_proj.weight", "mlp.shared_expert_gate.weight", "mlp.gate_proj.weight",
                           "shared_mlp.input_linear.weight", "mixer.shared_experts.up_proj.weight", "mixer.in_proj.weight"}) {
    EXPECT_FALSE(is_routed(kind)) << kind;
  }
}

TEST(Names, StateIsMadeByKeysValuesAndRecurrentInputs) {
  for (const char* kind :
       {"self_attn.k_proj.weight", "self_attn.v_proj.bias", "input_layernorm.weight", "linear_attn.in_proj_qkvz.weight",
        "linear_attn.conv1d.weight", "linear_attn.A_log", "mixer.in_proj.weight", "self_attn.kv_b_proj.weight", "norm.weight",
        "linear_attn.in_proj_ba.weight", "linear_attn.in_proj_a.weight", "mamba.in_proj.weight", "mamba.dt_bias",
        "mixer.conv1d.bias", "self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_a_layernorm.weight"}) {
    EXPECT_TRUE(makes_state(kind)) << kind;
  }
  for (const char* kind :
       {"self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight", "linear_attn.out_proj.weight",
        "linear_attn.norm.weight", "linear_attn.in_proj_z.weight", "post_attention_layernorm.weight", "model.norm.weight",
        "mixer.D", "self_attn.q_norm.weight", "self_attn.q_a_proj.weight", "self_attn.indexer.k_norm.weight",
        "self_attn.indexer.wk.weight", "mixer.norm.weight", "mamba.out_proj.weight", "mlp.gate.weight"}) {
    EXPECT_FALSE(makes_state(kind)) << kind;
  }
}

}  // namespace
}  // namespace longstraw::compare
