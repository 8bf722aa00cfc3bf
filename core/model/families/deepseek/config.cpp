#include "core/model/families/deepseek/config.h"

#include "core/model/families/common.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace longstraw::core::model::deepseek {

namespace {

// Where the three configuration classes differ.
struct Defaults {
  int64_t query_rank = 1536;
  int64_t plain_dim = 128;
  int64_t value_dim = 128;
  int64_t groups = 8;
  int64_t chosen_groups = 4;
  double norm_eps = 1e-6;
  int64_t max_positions = 4096;
  int64_t index_heads = 64;
  bool interleaved_indexer = false;
};

void refuse_others(const JsonReader& config) {
  refuse_unsupported(config);
  if (config.flag("mlp_bias", false)) config.unsupported("mlp_bias", "these models have no such biases");
  // Keys of the models' own code; transformers knows one way only and does not read them.
  if (config.text("topk_method", "noaux_tc") != "noaux_tc") config.unsupported("topk_method", "only noaux_tc is supported");
  if (config.text("scoring_func", "sigmoid") != "sigmoid") config.unsupported("scoring_func", "only sigmoid is supported");
  if (config.positive("moe_layer_freq", 1) != 1) config.unsupported("moe_layer_freq", "only 1 is supported");
}

// A key whose null transformers takes for false.
bool flag_or_null(const JsonReader& config, std::string_view key, bool otherwise) {
  return config.is_present(key) && !config.has(key) ? false : config.flag(key, otherwise);
}

Architecture read_common(const JsonReader& config, const Defaults& defaults) {
  refuse_others(config);
  Architecture a;
  a.model_type = config.text("model_type");
  a.layers = config.positive("num_hidden_layers");
  a.hidden = config.positive("hidden_size");
  a.heads = config.positive("num_attention_heads");
  a.kv_heads = config.positive("num_key_value_heads", a.heads);
  if (a.kv_heads != a.heads) {
    config.refuse("num_key_value_heads", fmt::format("num_attention_heads ({}): latents have no groups of heads", a.heads));
  }
  a.intermediate = config.positive("intermediate_size");
  a.vocab = config.positive("vocab_size");
  a.norm_eps = config.positive_number("rms_norm_eps", defaults.norm_eps);
  a.tied_embeddings = config.flag("tie_word_embeddings", false);
  a.window.assign(size_t(a.layers), std::nullopt);
  const char* prediction = config.has("num_nextn_predict_layers") ? "num_nextn_predict_layers" : "num_mtp_layers";
  a.prediction_layers = config.count(prediction, 1);
  if (a.prediction_layers > a.layers) config.refuse(prediction, fmt::format("no more than num_hidden_layers ({})", a.layers));
  return a;
}

// Scores times qk_head_dim^-0.5, and by yarn's m² where the rotary parameters name mscale_all_dim.
double score_scale(const Rotary& rotary, int64_t head_dim) {
  const double scale = std::pow(double(head_dim), -0.5);
  if (rotary.mscale_all_dim == 0 || rotary.factor <= 1) return scale;
  const double m = 0.1 * rotary.mscale_all_dim * std::log(rotary.factor) + 1.0;
  return scale * m * m;
}

void read_attention(const JsonReader& config, const Defaults& defaults, Config& out) {
  Architecture& a = out.architecture;
  LatentAttentionShape& shape = out.attention;
  shape.heads = a.heads;
  // Null: one projection; missing: the class's default.
  if (!config.is_present("q_lora_rank") || config.has("q_lora_rank"))
    shape.query_rank = config.positive("q_lora_rank", defaults.query_rank);
  shape.latent = config.positive("kv_lora_rank", 512);
  shape.rotary_dim = config.positive("qk_rope_head_dim", 64);
  if (shape.rotary_dim % 2 != 0) config.refuse("qk_rope_head_dim", "an even number: the rotation pairs dimensions");
  shape.plain_dim = config.positive("qk_nope_head_dim", defaults.plain_dim);
  shape.value_dim = config.positive("v_head_dim", defaults.value_dim);
  shape.bias = a.query_key_value_bias = a.attention_output_bias = config.flag("attention_bias", false);
  a.head_dim = shape.plain_dim + shape.rotary_dim;
  a.rotary = read_rotary(config, shape.rotary_dim, {.max_positions = defaults.max_positions});
  if (a.rotary.type != RotaryType::kDefault && a.rotary.type != RotaryType::kYarn) {
    config.unsupported(config.has("rope_scaling") ? "rope_scaling" : "rope_parameters",
                       fmt::format("rotary scaling {}: latent attention supports default and yarn", name_of(a.rotary.type)));
  }
  shape.scale = score_scale(a.rotary, a.head_dim);
}

int64_t read_expert_count(const JsonReader& config) {
  int64_t experts = config.positive("n_routed_experts", 256);
  for (const char* older : {"num_experts", "num_local_experts"}) {
    if (!config.has(older)) continue;
    if (config.has("n_routed_experts") && config.positive(older) != experts)
      config.refuse(older, fmt::format("n_routed_experts ({}), which is given too", experts));
    experts = config.positive(older);
  }
  return experts;
}

void read_experts(const JsonReader& config, const Defaults& defaults, Config& out) {
  ExpertsShape& shape = out.experts;
  shape.experts = read_expert_count(config);
  shape.chosen = config.positive("num_experts_per_tok", 8);
  check_chosen(config, "num_experts_per_tok", shape.chosen, shape.experts);
  shape.width = config.positive("moe_intermediate_size", 2048);
  shape.shared_width = shape.width * config.count("n_shared_experts", 1);
  out.routing =
      read_grouped_routing(config, shape.experts, shape.chosen,
                           {.groups = defaults.groups, .chosen_groups = defaults.chosen_groups, .normalised = true, .scale = 2.5});
  out.routing.normalised = flag_or_null(config, "norm_topk_prob", true);
}

void read_mlp_layers(const JsonReader& config, bool has_list, Config& out) {
  out.layers.resize(size_t(out.architecture.layers));
  if (has_list && config.has("mlp_layer_types")) {
    const auto types = config.texts("mlp_layer_types");
    if (types.size() != out.layers.size())
      config.refuse("mlp_layer_types", fmt::format("{} entries, one a layer", out.layers.size()));
    for (size_t n = 0; n < types.size(); ++n) {
      if (types[n] != "sparse" && types[n] != "dense") config.refuse("mlp_layer_types", "dense or sparse");
      out.layers[n].has_experts = types[n] == "sparse";
    }
    return;
  }
  const int64_t dense = config.count("first_k_dense_replace", 3);
  for (size_t n = 0; n < out.layers.size(); ++n) out.layers[n].has_experts = int64_t(n) >= dense;
}

void read_indexer(const JsonReader& config, const Defaults& defaults, Config& out) {
  if (!out.attention.query_rank) config.refuse("q_lora_rank", "a whole number > 0: the indexer's queries are made from it");
  if (!config.flag("rope_interleave", true))
    config.unsupported("rope_interleave", "only true is supported in a model with an indexer");
  if (config.has("layer_types")) {
    const auto types = config.texts("layer_types");
    const auto sparse = std::count(types.begin(), types.end(), "deepseek_sparse_attention");
    if (types.size() != out.layers.size() || size_t(sparse) != types.size())
      config.refuse("layer_types", fmt::format("{} times deepseek_sparse_attention", out.layers.size()));
  }
  IndexerShape indexer;
  indexer.heads = config.positive("index_n_heads", defaults.index_heads);
  indexer.head_dim = config.positive("index_head_dim", 128);
  indexer.top_k = config.positive("index_topk", 2048);
  // transformers does not read this key and takes each family's default; published files that have it mean it.
  indexer.interleaved_rotary = config.flag("indexer_rope_interleave", defaults.interleaved_indexer);
  if (indexer.head_dim < out.attention.rotary_dim) {
    config.refuse("index_head_dim", fmt::format("at least qk_rope_head_dim ({}), of which the first are rotated; it is {}",
                                                out.attention.rotary_dim, indexer.head_dim));
  }
  out.indexer = indexer;
  for (LayerPlan& layer : out.layers) layer.has_indexer = true;
}

// "full" or "shared" by layer: a list; else the pattern "FSSS…" (or such a list); else every index_topk_freq-th layer.
std::vector<std::string> indexer_types(const JsonReader& config, int64_t layers) {
  if (config.has("indexer_types")) return config.texts("indexer_types");
  std::vector<std::string> types;
  if (config.has("index_topk_pattern")) {
    if (!config.json().at("index_topk_pattern").is_string()) return config.texts("index_topk_pattern");
    for (const char letter : config.text("index_topk_pattern")) {
      if (letter != 'F' && letter != 'S') config.refuse("index_topk_pattern", "the letters F and S, one a layer");
      types.push_back(letter == 'F' ? "full" : "shared");
    }
    return types;
  }
  const int64_t every = std::max<int64_t>(1, config.count("index_topk_freq", 1));
  const int64_t offset = config.count("index_skip_topk_offset", 2);
  for (int64_t n = 0; n < layers; ++n) types.push_back(std::max<int64_t>(n - offset + 1, 0) % every == 0 ? "full" : "shared");
  return types;
}

void read_shared_indexers(const JsonReader& config, Config& out) {
  const char* key = config.has("indexer_types")        ? "indexer_types"
                    : config.has("index_topk_pattern") ? "index_topk_pattern"
                                                       : "index_skip_topk_offset";
  const auto types = indexer_types(config, out.architecture.layers);
  if (types.size() != out.layers.size()) config.refuse(key, fmt::format("{} entries, one a layer", out.layers.size()));
  for (size_t n = 0; n < types.size(); ++n) {
    if (types[n] != "full" && types[n] != "shared") config.refuse(key, "full or shared");
    out.layers[n].has_indexer = types[n] == "full";
  }
  if (!out.layers.front().has_indexer) config.refuse(key, "full in layer 0: there is no layer before it to share with");
}

Config read(const JsonReader& config, const Defaults& defaults) {
  Config out{.architecture = read_common(config, defaults)};
  read_attention(config, defaults, out);
  read_experts(config, defaults, out);
  return out;
}

}  // namespace

Config read_deepseek_v3(const JsonReader& config) {
  Config out = read(config, {});
  out.attention.interleaved_rotary = flag_or_null(config, "rope_interleave", true);
  read_mlp_layers(config, /*has_list=*/false, out);
  return out;
}

Config read_deepseek_v32(const JsonReader& config) {
  const Defaults defaults{.max_positions = 163840};
  Config out = read(config, defaults);
  read_mlp_layers(config, /*has_list=*/true, out);
  read_indexer(config, defaults, out);
  for (const char* key : {"indexer_types", "index_topk_pattern"}) {
    if (config.has(key)) config.unsupported(key, "deepseek_v32 has an indexer in every layer");
  }
  if (config.count("index_topk_freq", 1) > 1) config.unsupported("index_topk_freq", "deepseek_v32 has an indexer in every layer");
  return out;
}

Config read_glm_moe_dsa(const JsonReader& config) {
  const Defaults defaults{.query_rank = 2048,
                          .plain_dim = 192,
                          .value_dim = 256,
                          .groups = 1,
                          .chosen_groups = 1,
                          .norm_eps = 1e-5,
                          .max_positions = 202752,
                          .index_heads = 32,
                          .interleaved_indexer = true};
  Config out = read(config, defaults);
  read_mlp_layers(config, /*has_list=*/true, out);
  read_indexer(config, defaults, out);
  read_shared_indexers(config, out);
  return out;
}

}  // namespace longstraw::core::model::deepseek
