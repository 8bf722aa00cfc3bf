// config.json of Qwen3-Next, Qwen3.5 and Qwen3.6: defaults, what is refused by name, and the published models.
#include "tests/model/config_reading.h"

namespace longstraw::core::model {
namespace {

using nlohmann::json;
using testing::ElementsAre;

// The keys without which there is no model; the rest is default.
json minimal(const std::string& model_type, int64_t layers = 4) {
  return {{"model_type", model_type},
          {"num_hidden_layers", layers},
          {"hidden_size", 64},
          {"num_attention_heads", 4},
          {"vocab_size", 32}};
}

// As published, without the keys that neither we nor transformers read.
json qwen3_next_80b() {
  return {{"model_type", "qwen3_next"},
          {"attention_bias", false},
          {"decoder_sparse_step", 1},
          {"full_attention_interval", 4},
          {"head_dim", 256},
          {"hidden_act", "silu"},
          {"hidden_size", 2048},
          {"intermediate_size", 5120},
          {"linear_conv_kernel_dim", 4},
          {"linear_key_head_dim", 128},
          {"linear_num_key_heads", 16},
          {"linear_num_value_heads", 32},
          {"linear_value_head_dim", 128},
          {"max_position_embeddings", 262144},
          {"mlp_only_layers", json::array()},
          {"moe_intermediate_size", 512},
          {"norm_topk_prob", true},
          {"num_attention_heads", 16},
          {"num_experts", 512},
          {"num_experts_per_tok", 10},
          {"num_hidden_layers", 48},
          {"num_key_value_heads", 2},
          {"partial_rotary_factor", 0.25},
          {"rms_norm_eps", 1e-6},
          {"rope_scaling", nullptr},
          {"rope_theta", 10000000},
          {"shared_expert_intermediate_size", 512},
          {"tie_word_embeddings", false},
          {"vocab_size", 151936}};
}

json qwen3_6_27b() {
  json types = json::array();
  for (int n = 0; n < 64; ++n) types.push_back((n + 1) % 4 == 0 ? "full_attention" : "linear_attention");
  return {{"model_type", "qwen3_5"},
          {"architectures", {"Qwen3_5ForConditionalGeneration"}},
          {"tie_word_embeddings", false},
          {"vision_config", {{"model_type", "qwen3_5"}, {"hidden_size", 1152}}},
          {"text_config",
           {{"model_type", "qwen3_5_text"},
            {"attention_bias", false},
            {"attn_output_gate", true},
            {"eos_token_id", 248044},
            {"full_attention_interval", 4},
            {"head_dim", 256},
            {"hidden_act", "silu"},
            {"hidden_size", 5120},
            {"intermediate_size", 17408},
            {"layer_types", types},
            {"linear_conv_kernel_dim", 4},
            {"linear_key_head_dim", 128},
            {"linear_num_key_heads", 16},
            {"linear_num_value_heads", 48},
            {"linear_value_head_dim", 128},
            {"mamba_ssm_dtype", "float32"},
            {"max_position_embeddings", 262144},
            {"mtp_num_hidden_layers", 1},
            {"num_attention_heads", 24},
            {"num_hidden_layers", 64},
            {"num_key_value_heads", 4},
            {"output_gate_type", "swish"},
            {"rms_norm_eps", 1e-6},
            {"rope_parameters",
             {{"mrope_interleaved", true},
              {"mrope_section", {11, 11, 10}},
              {"partial_rotary_factor", 0.25},
              {"rope_theta", 10000000},
              {"rope_type", "default"}}},
            {"tie_word_embeddings", false},
            {"vocab_size", 248320}}}};
}

template <class Shape>
bool is(const DecoderParts& parts, size_t layer, size_t residual) {
  return std::holds_alternative<Shape>(parts.layers.at(layer).residuals.at(residual).blocks.at(0)->shape());
}

TEST(GatedDeltaConfig, TakesTheDefaultsOfTransformers) {
  const DecoderParts next = read_config(minimal("qwen3_next"));
  EXPECT_EQ(next.architecture.kv_heads, 2);
  EXPECT_EQ(next.architecture.head_dim, 256) << "not hidden / heads";
  EXPECT_EQ(next.architecture.rotary.dims, 64) << "a quarter of the head";
  EXPECT_EQ(next.architecture.rotary.max_positions, 32768);
  EXPECT_FALSE(next.architecture.tied_embeddings);
  EXPECT_TRUE(next.final_norm.zero_centred);
  const auto shape = std::get<AttentionShape>(next.layers[3].residuals[0].blocks[0]->shape());
  EXPECT_TRUE(shape.output_gate && shape.query_key_norm && shape.zero_centred_norm);
  const auto delta = std::get<DeltaRuleShape>(next.layers[0].residuals[0].blocks[0]->shape());
  EXPECT_TRUE(delta.fused_projections);
  EXPECT_EQ(delta.key_heads, 16);
  EXPECT_EQ(delta.value_heads, 32);
  const auto experts = std::get<ExpertsShape>(next.layers[0].residuals[1].blocks[0]->shape());
  EXPECT_EQ(experts.experts, 512);
  EXPECT_EQ(experts.chosen, 10);
  EXPECT_EQ(experts.shared_width, 512);

  const DecoderParts dense = read_config(minimal("qwen3_5_text"));
  EXPECT_EQ(dense.architecture.kv_heads, 4);
  EXPECT_EQ(dense.architecture.intermediate, 12288);
  EXPECT_TRUE(dense.builder.routers.empty());
  EXPECT_FALSE(std::get<DeltaRuleShape>(dense.layers[0].residuals[0].blocks[0]->shape()).fused_projections);

  const DecoderParts moe = read_config(minimal("qwen3_5_moe_text"));
  EXPECT_EQ(moe.architecture.kv_heads, 2);
  ASSERT_EQ(moe.builder.routers.size(), 4u);
  EXPECT_EQ(moe.builder.routers[0].experts, 256);
  EXPECT_EQ(moe.builder.routers[0].chosen, 8);
}

TEST(GatedDeltaConfig, LayersAreThoseNamedElseEveryFourthIsAttention) {
  const DecoderParts by_default = read_config(minimal("qwen3_5_text", 8));
  for (size_t n = 0; n < 8; ++n) EXPECT_EQ(is<AttentionShape>(by_default, n, 0), n == 3 || n == 7) << n;
  const DecoderParts interval = read_config(merged(minimal("qwen3_5_text"), {{"full_attention_interval", 2}}));
  for (size_t n = 0; n < 4; ++n) EXPECT_EQ(is<AttentionShape>(interval, n, 0), n % 2 == 1) << n;

  json named = minimal("qwen3_5_text", 2);
  named["layer_types"] = {"full_attention", "linear_attention"};
  const DecoderParts by_name = read_config(merged(named, {{"full_attention_interval", 2}}));
  EXPECT_TRUE(is<AttentionShape>(by_name, 0, 0) && is<DeltaRuleShape>(by_name, 1, 0));
  expect_refused(merged(named, {{"layer_types", {"full_attention"}}}), {"layer_types", "2 entries"});
  expect_refused(merged(named, {{"layer_types", {"full_attention", "sliding_attention"}}}), {"layer_types", "sliding_attention"});
}

TEST(GatedDeltaConfig, ExpertsStandWhereQwen3NextSays) {
  const auto sparse = [](const json& changes) {
    const DecoderParts parts = read_config(merged(minimal("qwen3_next"), changes));
    std::vector<bool> layers;
    for (size_t n = 0; n < 4; ++n) layers.push_back(is<ExpertsShape>(parts, n, 1));
    return layers;
  };
  EXPECT_THAT(sparse(json::object()), ElementsAre(true, true, true, true));
  EXPECT_THAT(sparse({{"mlp_only_layers", {0, 2}}}), ElementsAre(false, true, false, true));
  EXPECT_THAT(sparse({{"mlp_only_layers", nullptr}}), ElementsAre(true, true, true, true));
  EXPECT_THAT(sparse({{"decoder_sparse_step", 2}}), ElementsAre(false, true, false, true));
  EXPECT_THAT(sparse({{"decoder_sparse_step", 2}, {"mlp_only_layers", {3}}}), ElementsAre(false, true, false, false));
  EXPECT_THAT(sparse({{"num_experts", 0}}), ElementsAre(false, false, false, false));
}

TEST(GatedDeltaConfig, WhatCanNotBeComputedIsRefusedByName) {
  const json next = minimal("qwen3_next");
  expect_refused(merged(next, {{"linear_num_value_heads", 24}}), {"linear_num_value_heads", "24", "multiple of", "16"});
  expect_refused(merged(next, {{"num_experts_per_tok", 513}}), {"num_experts_per_tok", "513", "512"});
  expect_refused(merged(next, {{"num_experts", -1}}), {"num_experts", "-1"});
  expect_refused(merged(next, {{"hidden_act", "gelu"}}), {"hidden_act", "gelu", "silu"});
  expect_refused(merged(next, {{"attn_output_gate", false}}), {"attn_output_gate", "false"});
  expect_refused(merged(next, {{"output_gate_type", "sigmoid"}}), {"output_gate_type", "sigmoid", "swish"});
  expect_refused(merged(next, {{"head_dim", 20}, {"partial_rotary_factor", 0.25}}), {"partial_rotary_factor", "0.25", "even"});
  expect_refused(merged(next, {{"linear_key_head_dim", 0}}), {"linear_key_head_dim", "0"});
  expect_refused(without(next, "hidden_size"), {"hidden_size", "nothing"});
}

TEST(GatedDeltaConfig, AMultimodalModelIsItsTextPart) {
  const json config{{"model_type", "qwen3_5"}, {"text_config", merged(minimal("qwen3_5_text"), {{"eos_token_id", {7, 9}}})}};
  const DecoderParts parts = read_config(config);
  EXPECT_EQ(parts.architecture.model_type, "qwen3_5");
  EXPECT_THAT(parts.architecture.eos_ids, ElementsAre(7, 9));
  const DecoderParts text = read_config(config["text_config"]);
  ASSERT_EQ(parts.builder.parameters.size(), text.builder.parameters.size());
  for (size_t i = 0; i < text.builder.parameters.size(); ++i) {
    EXPECT_EQ(parts.builder.parameters[i]->name, text.builder.parameters[i]->name);
    EXPECT_EQ(parts.builder.parameters[i]->shape, text.builder.parameters[i]->shape);
  }
  EXPECT_TRUE(read_config(merged(config, {{"tie_word_embeddings", true}})).architecture.tied_embeddings);

  json disagreeing = merged(config, {{"tie_word_embeddings", true}});
  disagreeing["text_config"]["tie_word_embeddings"] = false;
  expect_refused(disagreeing, {"tie_word_embeddings", "true", "text_config"});
  json faulty = config;
  faulty["text_config"]["num_key_value_heads"] = 3;
  expect_refused(faulty, {"text_config.num_key_value_heads", "3", "divisor"});
  faulty = config;
  faulty["text_config"]["model_type"] = "qwen3_5_moe_text";
  expect_refused(faulty, {"text_config.model_type", "qwen3_5_moe_text", "qwen3_5_text"});
  expect_refused({{"model_type", "qwen3_5_moe"}}, {"text_config", "nothing", "object"});
}

TEST(GatedDeltaConfig, TheMultimodalFileLosesItsPrefixAndOtherParts) {
  const CheckpointLayout layout = family_of("qwen3_5", "config.json").layout({});
  ASSERT_EQ(layout.prefixes.size(), 1u);
  EXPECT_EQ(layout.prefixes[0].from, "model.language_model.");
  EXPECT_EQ(layout.prefixes[0].to, "model.");
  EXPECT_THAT(layout.skipped, ElementsAre("model.visual.", "mtp."));
}

// Counts of parameters and tensors are those of transformers' own model of the same configuration; bytes are
// 2 · (2 · kv heads · head) a token and layer with attention, and 4 · heads · k · v + 2 · 3 · channels a delta rule.
TEST(GatedDeltaConfig, Qwen3Next80BHasItsPublishedSize) {
  const DecoderParts parts = read_config(qwen3_next_80b());
  const Sums sums = sums_of(parts);
  EXPECT_EQ(sums.parameters, 79'674'391'296);
  EXPECT_EQ(sums.state_bytes_per_token, 24'576);
  EXPECT_EQ(sums.state_bytes_fixed, 77'266'944);
  EXPECT_EQ(parts.builder.routers.size(), 48u);
  EXPECT_EQ(parts.architecture.rotary.theta, 1e7);
}

TEST(GatedDeltaConfig, Qwen36Of27BHasItsPublishedSize) {
  const DecoderParts parts = read_config(qwen3_6_27b());
  const Sums sums = sums_of(parts);
  EXPECT_EQ(sums.tensors, 851);
  EXPECT_EQ(sums.parameters, 26'895'998'464);
  EXPECT_EQ(sums.state_bytes_per_token, 65'536);
  EXPECT_EQ(sums.state_bytes_fixed, 153'944'064);
  EXPECT_EQ(parts.builder.states.size(), 64u);
  EXPECT_EQ(parts.builder.states[0].kind, "gated delta rule");
  EXPECT_EQ(parts.builder.states[3].kind, "full attention");
  EXPECT_THAT(parts.architecture.eos_ids, ElementsAre(248044));
  ASSERT_NE(find_parameter(parts, "model.layers.3.self_attn.q_proj.weight"), nullptr);
  EXPECT_THAT(find_parameter(parts, "model.layers.3.self_attn.q_proj.weight")->shape, ElementsAre(2 * 24 * 256, 5120));
}

TEST(GatedDeltaConfig, Qwen36Of35BIsTheDefaultOfItsClass) {
  const DecoderParts parts = read_config(
      merged(minimal("qwen3_5_moe_text", 40), {{"hidden_size", 2048}, {"num_attention_heads", 16}, {"vocab_size", 248320}}));
  const Sums sums = sums_of(parts);
  EXPECT_EQ(sums.parameters, 34'660'610'688);
  EXPECT_EQ(sums.state_bytes_per_token, 20'480);
  EXPECT_EQ(sums.state_bytes_fixed, 64'389'120);
}

}  // namespace
}  // namespace longstraw::core::model
