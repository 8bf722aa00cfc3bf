#include "tests/support/families.h"

#include "tests/support/fixture.h"

#include <fstream>

namespace longstraw::test {

namespace {

using nlohmann::json;

json golden_config(const std::string& variant) {
  std::ifstream file(golden_folder(variant) / "config.json");
  json config = json::parse(file);
  config.erase("eos_token_id");
  // The norm of a delta rule's head divides by that head's size, and of a random model some are almost 0: one such token would
  // be most of the rounding error. A larger eps bounds it.
  if (config.contains("linear_key_head_dim")) config["rms_norm_eps"] = 1e-2;
  return config;
}

}  // namespace

std::vector<Family> small_families() {
  std::vector<Family> families;
  for (const char* variant : {"llama",
                              "mistral_sw",
                              "qwen2_mixed_sw",
                              "qwen3",
                              "smollm3",
                              "glm4_moe",
                              "qwen3_next",
                              "qwen3_next_mixed",
                              "qwen3_5",
                              "qwen3_5_moe",
                              "deepseek_v3",
                              "deepseek_v3_plain",
                              "deepseek_v32",
                              "glm_moe_dsa",
                              "mamba2",
                              "mamba2_tied",
                              "nemotron_h",
                              "nemotron_h_moe",
                              "nemotron_h_latent",
                              "bamba",
                              "falcon_h1",
                              "falcon_h1_norm",
                              "falcon_h1_norm_first",
                              "granitemoehybrid",
                              "granitemoehybrid_dense"}) {
    families.push_back({variant, golden_config(variant)});
  }
  return families;
}

std::vector<Family> wide_families() {
  const json sizes{{"hidden_size", 64}, {"intermediate_size", 128}, {"vocab_size", 96}};
  const json heads{{"num_attention_heads", 4}, {"num_key_value_heads", 2}, {"head_dim", 16}};
  const json experts{{"moe_intermediate_size", 32}};
  // The norm of a delta rule's head divides by that head's size, and of a random model some are almost 0: one such token would
  // be most of the rounding error. A larger eps bounds it.
  const json delta{{"linear_key_head_dim", 16}, {"linear_value_head_dim", 16}, {"shared_expert_intermediate_size", 32}};
  const json latent{{"kv_lora_rank", 32},       {"q_lora_rank", 48}, {"qk_nope_head_dim", 16}, {"qk_rope_head_dim", 8},
                    {"qk_head_dim", 24},        {"v_head_dim", 16},  {"head_dim", 8},          {"num_attention_heads", 4},
                    {"num_key_value_heads", 4}, {"index_topk", 24},  {"index_head_dim", 16}};
  const json mamba{{"mamba_n_heads", 8}, {"mamba_d_head", 16}, {"mamba_d_state", 16}, {"mamba_chunk_size", 16}};
  struct Patches {
    const char* variant;
    std::vector<json> patches;
  };
  const std::vector<Patches> all{
      {"smollm3", {sizes, heads}},
      {"glm4_moe", {sizes, heads, experts}},
      {"qwen3_next", {sizes, heads, experts, delta}},
      {"qwen3_5", {sizes, heads, delta}},
      {"deepseek_v3", {sizes, latent, experts}},
      {"deepseek_v32", {sizes, latent, experts}},
      {"glm_moe_dsa", {sizes, latent, experts}},
      {"mamba2", {sizes, {{"num_heads", 8}, {"head_dim", 16}, {"state_size", 16}}}},
      {"nemotron_h", {sizes, heads, {{"mamba_num_heads", 8}, {"mamba_head_dim", 16}, {"ssm_state_size", 16}}}},
      {"bamba", {sizes, heads, mamba}},
      {"falcon_h1", {sizes, heads, mamba, {{"mamba_d_ssm", 128}}}},
      {"granitemoehybrid", {sizes, heads, mamba, {{"shared_intermediate_size", 64}, {"intermediate_size", 32}}}},
  };
  std::vector<Family> families;
  for (const auto& [variant, patches] : all) {
    json config = golden_config(variant);
    for (const json& patch : patches) config.update(patch);
    families.push_back({variant, config});
  }
  return families;
}

nlohmann::json without_choices(nlohmann::json config) {
  for (const char* experts : {"num_experts", "n_routed_experts", "num_local_experts"}) {
    if (!config.contains(experts) || config[experts] == 0) continue;
    config["num_experts_per_tok"] = config[experts];
    // Groups of experts are a choice too.
    if (config.contains("n_group")) config["topk_group"] = config["n_group"];
  }
  if (config.contains("index_topk")) config["index_topk"] = 1 << 20;
  return config;
}

}  // namespace longstraw::test
