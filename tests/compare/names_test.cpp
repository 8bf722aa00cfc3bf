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

TEST(Names, StateIsMadeByKeysValuesAndRecurrentInputs) {
  for (const char* kind :
       {"self_attn.k_proj.weight", "self_attn.v_proj.bias", "input_layernorm.weight", "linear_attn.in_proj_qkvz.weight",
        "linear_attn.conv1d.weight", "linear_attn.A_log", "mixer.in_proj.weight", "self_attn.kv_b_proj.weight", "norm.weight"}) {
    EXPECT_TRUE(makes_state(kind)) << kind;
  }
  for (const char* kind : {"self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight",
                           "linear_attn.out_proj.weight", "linear_attn.norm.weight", "linear_attn.in_proj_z.weight",
                           "post_attention_layernorm.weight", "model.norm.weight", "mixer.D", "self_attn.q_norm.weight"}) {
    EXPECT_FALSE(makes_state(kind)) << kind;
  }
}

}  // namespace
}  // namespace longstraw::compare
