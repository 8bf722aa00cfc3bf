// The dense families: config.json, and the decoder it describes. The defaults are those of the configuration classes of Hugging
// Face transformers.
#include "core/model/families/dense/dense.h"

#include "core/model/blocks/attention.h"
#include "core/model/blocks/mlp.h"
#include "core/model/families/common.h"

#include <fmt/format.h>

#include <cmath>

namespace longstraw::core::model::dense {

namespace {

Architecture read_dense(const JsonReader& config, const SizeDefaults& defaults) {
  if (config.positive("pretraining_tp", 1) != 1) {
    config.unsupported("pretraining_tp", "only 1 is supported (it would change the order of summation)");
  }
  if (config.has("dual_chunk_attention_config")) {
    config.unsupported("dual_chunk_attention_config",
                       "dual chunk attention is not supported; remove the key to use full attention");
  }
  return read_sizes(config, defaults);
}

// Which layers have the window, by name.
void read_layer_types(const JsonReader& config, std::optional<int64_t> window, Architecture& a) {
  const auto types = config.texts("layer_types");
  if (int64_t(types.size()) != a.layers) config.refuse("layer_types", fmt::format("{} entries, one a layer", a.layers));
  for (size_t n = 0; n < types.size(); ++n) {
    if (types[n] == "sliding_attention") {
      if (!window) config.refuse("sliding_window", "a window (with use_sliding_window: true): layer_types names sliding_attention");
      a.window[n] = window;
    } else if (types[n] != "full_attention") {
      config.refuse("layer_types", "full_attention or sliding_attention");
    }
  }
}

// qwen2, qwen3: a window only with use_sliding_window, in the layers that layer_types names, else from
// max_window_layers on.
void read_layer_windows(const JsonReader& config, Architecture& a) {
  std::optional<int64_t> window;
  if (config.flag("use_sliding_window", false)) {
    // Missing: 4096. Null: none.
    if (!config.is_present("sliding_window")) window = 4096;
    else if (config.has("sliding_window")) window = config.positive("sliding_window");
  }
  if (config.has("layer_types")) return read_layer_types(config, window, a);
  const double first = config.number("max_window_layers", 28);
  if (first < 0) config.refuse("max_window_layers", "a whole number >= 0");
  for (int64_t n = 0; n < a.layers; ++n) {
    if (double(n) >= first) a.window[size_t(n)] = window;
  }
}

Architecture read_llama(const JsonReader& config) {
  Architecture a = read_dense(config, {.rotary = {.max_positions = 2048}});
  a.query_key_value_bias = a.attention_output_bias = config.flag("attention_bias", false);
  a.mlp_bias = config.flag("mlp_bias", false);
  return a;
}

Architecture read_mistral(const JsonReader& config) {
  Architecture a = read_dense(config, {.kv_heads = 8, .rotary = {.max_positions = 4096 * 32}});
  if (config.has("layer_types")) config.unsupported("layer_types", "mistral has one kind of attention in all layers");
  // Missing: the 4096 of the first release. Null (later releases): full attention.
  std::optional<int64_t> window;
  if (!config.is_present("sliding_window")) window = 4096;
  else if (config.has("sliding_window")) window = config.positive("sliding_window");
  a.window.assign(size_t(a.layers), window);
  return a;
}

Architecture read_qwen2(const JsonReader& config) {
  Architecture a = read_dense(config, {.kv_heads = 32, .rotary = {.max_positions = 32768}});
  a.query_key_value_bias = true;
  read_layer_windows(config, a);
  return a;
}

struct Smollm3 {
  Architecture architecture;
  std::vector<int64_t> rotary;  // by layer: 0 has no position embedding
};

Smollm3 read_smollm3(const JsonReader& config) {
  Architecture a = read_dense(config, {.kv_heads = 4, .tied_embeddings = true, .rotary = {.max_positions = 32768, .theta = 2e6}});
  a.query_key_value_bias = a.attention_output_bias = config.flag("attention_bias", false);
  a.mlp_bias = config.flag("mlp_bias", false);
  std::vector<int64_t> rotary = config.ids("no_rope_layers");
  if (!config.has("no_rope_layers")) {
    const int64_t interval = config.positive("no_rope_layer_interval", 4);
    for (int64_t n = 0; n < a.layers; ++n) rotary.push_back((n + 1) % interval != 0);
  }
  if (int64_t(rotary.size()) < a.layers) config.refuse("no_rope_layers", fmt::format("{} entries, one a layer", a.layers));

  // Where the window is on, it is those layers' that have no positions, unless layer_types says otherwise.
  std::optional<int64_t> window;
  if (config.flag("use_sliding_window", false) && config.has("sliding_window")) window = config.positive("sliding_window");
  if (config.has("layer_types")) {
    read_layer_types(config, window, a);
  } else {
    for (size_t n = 0; n < size_t(a.layers); ++n) a.window[n] = rotary[n] == 0 ? window : std::nullopt;
  }
  return {std::move(a), std::move(rotary)};
}

Architecture read_qwen3(const JsonReader& config) {
  Architecture a = read_dense(config, {.kv_heads = 32, .head_dim = 128, .rotary = {.max_positions = 32768}});
  a.query_key_value_bias = a.attention_output_bias = config.flag("attention_bias", false);
  a.query_key_norm = true;
  read_layer_windows(config, a);
  return a;
}

// `rotary` by layer: 0 has no position embedding; empty: all have.
DecoderParts compose(Architecture architecture, const std::vector<int64_t>& rotary = {}) {
  DecoderParts parts;
  const Architecture& a = architecture;
  Builder& b = parts.builder;
  parts.embedding = b.parameter("model.embed_tokens.weight", {a.vocab, a.hidden});
  for (int64_t n = 0; n < a.layers; ++n) {
    const std::string prefix = fmt::format("model.layers.{}.", n);
    Layer layer;
    Residual& attention = layer.residuals.emplace_back();
    attention.norm = {b.parameter(prefix + "input_layernorm.weight", {a.hidden}), a.norm_eps};
    attention.blocks.push_back(
        std::make_unique<AttentionBlock>(b, prefix + "self_attn.", n, a.hidden, a.norm_eps,
                                         AttentionShape{.heads = a.heads,
                                                        .kv_heads = a.kv_heads,
                                                        .head_dim = a.head_dim,
                                                        .scale = std::pow(double(a.head_dim), -0.5),
                                                        .window = a.window[size_t(n)],
                                                        .query_key_value_bias = a.query_key_value_bias,
                                                        .output_bias = a.attention_output_bias,
                                                        .query_key_norm = a.query_key_norm,
                                                        .rotary = rotary.empty() || rotary[size_t(n)] != 0}));
    Residual& mlp = layer.residuals.emplace_back();
    mlp.norm = {b.parameter(prefix + "post_attention_layernorm.weight", {a.hidden}), a.norm_eps};
    mlp.blocks.push_back(
        std::make_unique<MlpBlock>(b, prefix + "mlp.", a.hidden, MlpShape{.width = a.intermediate, .bias = a.mlp_bias}));
    parts.layers.push_back(std::move(layer));
  }
  parts.final_norm = {b.parameter("model.norm.weight", {a.hidden}), a.norm_eps};
  parts.output = a.tied_embeddings ? parts.embedding : b.parameter("lm_head.weight", {a.vocab, a.hidden});
  parts.architecture = std::move(architecture);
  return parts;
}

}  // namespace

DecoderParts llama(const JsonReader& config) { return compose(read_llama(config)); }
DecoderParts mistral(const JsonReader& config) { return compose(read_mistral(config)); }
DecoderParts qwen2(const JsonReader& config) { return compose(read_qwen2(config)); }
DecoderParts qwen3(const JsonReader& config) { return compose(read_qwen3(config)); }

DecoderParts smollm3(const JsonReader& config) {
  Smollm3 read = read_smollm3(config);
  return compose(std::move(read.architecture), read.rotary);
}

}  // namespace longstraw::core::model::dense
