// config.json of the dense families. The defaults are those of the configuration classes of Hugging Face transformers.
#include "core/model/families/dense/dense.h"

#include <fmt/format.h>

namespace longstraw::core::model::dense {

namespace {

void refuse_unsupported(const JsonReader& config) {
  if (config.text("hidden_act", "silu") != "silu") config.unsupported("hidden_act", "only silu is supported");
  if (config.positive("pretraining_tp", 1) != 1) {
    config.unsupported("pretraining_tp", "only 1 is supported (it would change the order of summation)");
  }
  if (config.number("attention_dropout", 0) != 0) config.unsupported("attention_dropout", "only 0 is supported");
  if (config.has("dual_chunk_attention_config")) {
    config.unsupported("dual_chunk_attention_config",
                       "dual chunk attention is not supported; remove the key to use full attention");
  }
  if (config.has("quantization_config")) {
    config.unsupported("quantization_config", "quantized checkpoints are not supported; convert it to bf16, fp16 or fp32");
  }
}

struct Defaults {
  std::optional<int64_t> kv_heads = {};  // none: as many as heads
  std::optional<int64_t> head_dim = {};  // none: hidden / heads
  int64_t max_positions = 2048;
};

Architecture read_common(const JsonReader& config, const Defaults& defaults) {
  refuse_unsupported(config);
  Architecture a;
  a.model_type = config.text("model_type");
  a.layers = config.positive("num_hidden_layers");
  a.hidden = config.positive("hidden_size");
  a.heads = config.positive("num_attention_heads");
  a.intermediate = config.positive("intermediate_size");
  a.vocab = config.positive("vocab_size");
  a.norm_eps = config.positive_number("rms_norm_eps", 1e-6);
  a.tied_embeddings = config.flag("tie_word_embeddings", false);

  // Null says "as many as heads", a missing key says "the class's default".
  a.kv_heads = config.has("num_key_value_heads")          ? config.positive("num_key_value_heads")
               : config.is_present("num_key_value_heads") ? a.heads
                                                          : defaults.kv_heads.value_or(a.heads);
  if (a.heads % a.kv_heads != 0) {
    config.refuse("num_key_value_heads", fmt::format("a divisor of num_attention_heads ({}); it is {}", a.heads, a.kv_heads));
  }
  if (config.has("head_dim")) {
    a.head_dim = config.positive("head_dim");
  } else if (defaults.head_dim) {
    a.head_dim = *defaults.head_dim;
  } else {
    if (a.hidden % a.heads != 0) {
      config.refuse("hidden_size", fmt::format("a multiple of num_attention_heads ({}), or a head_dim", a.heads));
    }
    a.head_dim = a.hidden / a.heads;
  }
  a.window.assign(size_t(a.layers), std::nullopt);
  a.rotary = read_rotary(config, a.head_dim, defaults.max_positions);
  return a;
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
  if (config.has("layer_types")) {
    const auto types = config.texts("layer_types");
    if (int64_t(types.size()) != a.layers) config.refuse("layer_types", fmt::format("{} entries, one a layer", a.layers));
    for (size_t n = 0; n < types.size(); ++n) {
      if (types[n] == "sliding_attention") {
        if (!window)
          config.refuse("sliding_window", "a window (with use_sliding_window: true): layer_types names sliding_attention");
        a.window[n] = window;
      } else if (types[n] != "full_attention") {
        config.refuse("layer_types", "full_attention or sliding_attention");
      }
    }
    return;
  }
  const double first = config.number("max_window_layers", 28);
  if (first < 0) config.refuse("max_window_layers", "a whole number >= 0");
  for (int64_t n = 0; n < a.layers; ++n) {
    if (double(n) >= first) a.window[size_t(n)] = window;
  }
}

}  // namespace

Architecture read_llama(const JsonReader& config) {
  Architecture a = read_common(config, {.max_positions = 2048});
  a.query_key_value_bias = a.attention_output_bias = config.flag("attention_bias", false);
  a.mlp_bias = config.flag("mlp_bias", false);
  return a;
}

Architecture read_mistral(const JsonReader& config) {
  Architecture a = read_common(config, {.kv_heads = 8, .max_positions = 4096 * 32});
  if (config.has("layer_types")) config.unsupported("layer_types", "mistral has one kind of attention in all layers");
  // Missing: the 4096 of the first release. Null (later releases): full attention.
  std::optional<int64_t> window;
  if (!config.is_present("sliding_window")) window = 4096;
  else if (config.has("sliding_window")) window = config.positive("sliding_window");
  a.window.assign(size_t(a.layers), window);
  return a;
}

Architecture read_qwen2(const JsonReader& config) {
  Architecture a = read_common(config, {.kv_heads = 32, .max_positions = 32768});
  a.query_key_value_bias = true;
  read_layer_windows(config, a);
  return a;
}

Architecture read_qwen3(const JsonReader& config) {
  Architecture a = read_common(config, {.kv_heads = 32, .head_dim = 128, .max_positions = 32768});
  a.query_key_value_bias = a.attention_output_bias = config.flag("attention_bias", false);
  a.query_key_norm = true;
  read_layer_windows(config, a);
  return a;
}

}  // namespace longstraw::core::model::dense
