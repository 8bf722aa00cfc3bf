#include "core/model/families/qwen3_next/config.h"

#include <fmt/format.h>

#include <algorithm>

namespace longstraw::core::model::qwen3_next {

namespace {

DeltaRuleShape read_delta_rule(const JsonReader& config) {
  DeltaRuleShape shape;
  shape.key_heads = config.positive("linear_num_key_heads", 16);
  shape.value_heads = config.positive("linear_num_value_heads", 32);
  shape.key_dim = config.positive("linear_key_head_dim", 128);
  shape.value_dim = config.positive("linear_value_head_dim", 128);
  shape.kernel = config.positive("linear_conv_kernel_dim", 4);
  if (shape.value_heads % shape.key_heads != 0) {
    config.refuse("linear_num_value_heads",
                  fmt::format("a multiple of linear_num_key_heads ({}); it is {}", shape.key_heads, shape.value_heads));
  }
  return shape;
}

// By layer: attention. layer_types names it, else it is every full_attention_interval-th layer.
std::vector<bool> read_layer_types(const JsonReader& config, int64_t layers) {
  std::vector<bool> attention;
  if (!config.has("layer_types")) {
    const int64_t interval = config.positive("full_attention_interval", 4);
    for (int64_t n = 0; n < layers; ++n) attention.push_back((n + 1) % interval == 0);
    return attention;
  }
  const auto types = config.texts("layer_types");
  if (int64_t(types.size()) != layers) config.refuse("layer_types", fmt::format("{} entries, one a layer", layers));
  for (const std::string& type : types) {
    if (type != "full_attention" && type != "linear_attention") {
      config.refuse("layer_types", "full_attention or linear_attention");
    }
    attention.push_back(type == "full_attention");
  }
  return attention;
}

ExpertsShape read_experts(const JsonReader& config, int64_t experts, int64_t chosen) {
  ExpertsShape shape;
  shape.experts = config.positive("num_experts", experts);
  shape.chosen = config.positive("num_experts_per_tok", chosen);
  check_chosen(config, "num_experts_per_tok", shape.chosen, shape.experts);
  shape.width = config.positive("moe_intermediate_size", 512);
  shape.shared_width = config.positive("shared_expert_intermediate_size", 512);
  return shape;
}

Config read_common(const JsonReader& config, SizeDefaults defaults) {
  // Keys of the published files that transformers does not read: what we compute is what they say there.
  if (!config.flag("attn_output_gate", true)) config.unsupported("attn_output_gate", "attention always has its output gate");
  const std::string gate = config.text("output_gate_type", "swish");
  if (gate != "swish" && gate != "silu") config.unsupported("output_gate_type", "only swish is supported");

  defaults.head_dim = 256;
  defaults.rotary = {.max_positions = 32768, .partial = 0.25};
  Config c;
  c.architecture = read_sizes(config, defaults);
  Architecture& a = c.architecture;
  a.query_key_value_bias = a.attention_output_bias = config.flag("attention_bias", false);
  a.query_key_norm = true;
  c.delta_rule = read_delta_rule(config);
  c.attention = read_layer_types(config, a.layers);
  c.sparse.assign(size_t(a.layers), false);
  return c;
}

}  // namespace

Config read_qwen3_next(const JsonReader& config) {
  Config c = read_common(config, {.kv_heads = 2, .intermediate = 5632});
  c.delta_rule.fused_projections = true;
  c.normalised_routing = config.flag("norm_topk_prob", true);
  const int64_t step = config.positive("decoder_sparse_step", 1);
  if (config.count("num_experts", 512) == 0) return c;
  c.experts = read_experts(config, 512, 10);
  const auto dense = config.ids("mlp_only_layers");
  for (int64_t n = 0; n < c.architecture.layers; ++n) {
    c.sparse[size_t(n)] = (n + 1) % step == 0 && std::find(dense.begin(), dense.end(), n) == dense.end();
  }
  return c;
}

Config read_qwen3_5(const JsonReader& config, bool moe) {
  if (!moe) return read_common(config, {.kv_heads = 4, .intermediate = 12288});
  Config c = read_common(config, {.kv_heads = 2, .intermediate = 0});
  c.experts = read_experts(config, 256, 8);
  c.sparse.assign(size_t(c.architecture.layers), true);
  return c;
}

Config read_qwen3_5_multimodal(const JsonReader& config, bool moe) {
  const JsonReader text = config.section("text_config");
  const std::string wanted = moe ? "qwen3_5_moe_text" : "qwen3_5_text";
  if (text.text("model_type", wanted) != wanted) text.refuse("model_type", wanted);
  Config c = read_qwen3_5(text, moe);
  Architecture& a = c.architecture;
  if (config.has("tie_word_embeddings")) {
    const bool tied = config.flag("tie_word_embeddings", false);
    if (text.has("tie_word_embeddings") && tied != a.tied_embeddings) {
      config.refuse("tie_word_embeddings", fmt::format("text_config.tie_word_embeddings, which is {}", a.tied_embeddings));
    }
    a.tied_embeddings = tied;
  }
  a.eos_ids = text.ids("eos_token_id");
  return c;
}

}  // namespace longstraw::core::model::qwen3_next
