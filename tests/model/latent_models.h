#pragma once
// config.json of a tiny model with latent attention and experts, and of the published ones.

#include "tests/support/fixture.h"

namespace longstraw::test {

// Two layers, the first with an MLP, D 16, 4 heads of 6 + 4 and 5 over a latent of 8, 8 experts in 4 groups.
inline nlohmann::json tiny_latent_config(const std::string& model_type, const nlohmann::json& changes = nlohmann::json::object()) {
  nlohmann::json config{{"model_type", model_type},
                        {"num_hidden_layers", 2},
                        {"hidden_size", 16},
                        {"num_attention_heads", 4},
                        {"num_key_value_heads", 4},
                        {"intermediate_size", 24},
                        {"vocab_size", 32},
                        {"q_lora_rank", 12},
                        {"kv_lora_rank", 8},
                        {"qk_rope_head_dim", 4},
                        {"qk_nope_head_dim", 6},
                        {"v_head_dim", 5},
                        {"moe_intermediate_size", 6},
                        {"n_routed_experts", 8},
                        {"num_experts_per_tok", 3},
                        {"n_group", 4},
                        {"topk_group", 2},
                        {"first_k_dense_replace", 1},
                        {"max_position_embeddings", 512}};
  if (model_type != "deepseek_v3") config.update({{"index_n_heads", 6}, {"index_head_dim", 8}, {"index_topk", 5}});
  config.merge_patch(changes);
  return config;
}

inline nlohmann::json published_deepseek_v3() {
  return {{"model_type", "deepseek_v3"},
          {"attention_bias", false},
          {"attention_dropout", 0.0},
          {"bos_token_id", 0},
          {"eos_token_id", 1},
          {"ep_size", 1},
          {"first_k_dense_replace", 3},
          {"hidden_act", "silu"},
          {"hidden_size", 7168},
          {"intermediate_size", 18432},
          {"kv_lora_rank", 512},
          {"max_position_embeddings", 163840},
          {"moe_intermediate_size", 2048},
          {"moe_layer_freq", 1},
          {"n_group", 8},
          {"n_routed_experts", 256},
          {"n_shared_experts", 1},
          {"norm_topk_prob", true},
          {"num_attention_heads", 128},
          {"num_experts_per_tok", 8},
          {"num_hidden_layers", 61},
          {"num_key_value_heads", 128},
          {"num_nextn_predict_layers", 1},
          {"q_lora_rank", 1536},
          {"qk_nope_head_dim", 128},
          {"qk_rope_head_dim", 64},
          {"quantization_config",
           {{"activation_scheme", "dynamic"}, {"fmt", "e4m3"}, {"quant_method", "fp8"}, {"weight_block_size", {128, 128}}}},
          {"rms_norm_eps", 1e-06},
          {"rope_scaling",
           {{"beta_fast", 32},
            {"beta_slow", 1},
            {"factor", 40},
            {"mscale", 1.0},
            {"mscale_all_dim", 1.0},
            {"original_max_position_embeddings", 4096},
            {"type", "yarn"}}},
          {"rope_theta", 10000},
          {"routed_scaling_factor", 2.5},
          {"scoring_func", "sigmoid"},
          {"tie_word_embeddings", false},
          {"topk_group", 4},
          {"topk_method", "noaux_tc"},
          {"torch_dtype", "bfloat16"},
          {"v_head_dim", 128},
          {"vocab_size", 129280}};
}

inline nlohmann::json published_deepseek_v32() {
  nlohmann::json config = published_deepseek_v3();
  config.update({{"model_type", "deepseek_v32"}, {"index_head_dim", 128}, {"index_n_heads", 64}, {"index_topk", 2048}});
  config["quantization_config"]["scale_fmt"] = "ue8m0";
  return config;
}

inline nlohmann::json published_glm_5_2() {
  return {{"model_type", "glm_moe_dsa"},
          {"attention_bias", false},
          {"dtype", "bfloat16"},
          {"eos_token_id", {154820, 154827, 154829}},
          {"first_k_dense_replace", 3},
          {"head_dim", 64},
          {"hidden_act", "silu"},
          {"hidden_size", 6144},
          {"index_head_dim", 128},
          {"index_n_heads", 32},
          {"index_skip_topk_offset", 3},
          {"index_topk", 2048},
          {"index_topk_freq", 4},
          {"indexer_rope_interleave", true},
          {"intermediate_size", 12288},
          {"kv_lora_rank", 512},
          {"max_position_embeddings", 1048576},
          {"moe_intermediate_size", 2048},
          {"n_group", 1},
          {"n_routed_experts", 256},
          {"n_shared_experts", 1},
          {"norm_topk_prob", true},
          {"num_attention_heads", 64},
          {"num_experts_per_tok", 8},
          {"num_hidden_layers", 78},
          {"num_key_value_heads", 64},
          {"num_nextn_predict_layers", 1},
          {"q_lora_rank", 2048},
          {"qk_head_dim", 256},
          {"qk_nope_head_dim", 192},
          {"qk_rope_head_dim", 64},
          {"rms_norm_eps", 1e-05},
          {"rope_interleave", true},
          {"rope_parameters", {{"rope_theta", 8000000}, {"rope_type", "default"}}},
          {"routed_scaling_factor", 2.5},
          {"scoring_func", "sigmoid"},
          {"tie_word_embeddings", false},
          {"topk_group", 1},
          {"topk_method", "noaux_tc"},
          {"v_head_dim", 256},
          {"vocab_size", 154880}};
}

}  // namespace longstraw::test
