#include "core/model/blocks/attention.h"
#include "core/model/blocks/mlp.h"
#include "core/model/blocks/state_space.h"
#include "core/model/families/common.h"
#include "core/model/families/mamba/mamba.h"
#include "core/model/families/mamba/mixer_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace longstraw::core::model::mamba {

namespace {

// Layers with attention; null, missing or empty: none.
std::vector<bool> read_attention_layers(const JsonReader& config, int64_t layers) {
  std::vector<bool> attention(size_t(layers), false);
  for (const int64_t n : config.ids("attn_layer_indices")) {
    if (n >= layers) config.refuse("attn_layer_indices", fmt::format("numbers below num_hidden_layers ({})", layers));
    attention[size_t(n)] = true;
  }
  return attention;
}

AttentionShape read_attention(const JsonReader& config, const Architecture& a) {
  const bool bias = config.flag("attention_bias", false);
  return {.heads = a.heads,
          .kv_heads = a.kv_heads,
          .head_dim = a.head_dim,
          .scale = std::pow(double(a.head_dim), -0.5),
          .query_key_value_bias = bias,
          .output_bias = bias};
}

}  // namespace

DecoderParts bamba(const JsonReader& config) {
  DecoderParts parts;
  Architecture& a = parts.architecture;
  a = read_sizes(config, {.kv_heads = 8, .norm_eps = 1e-5, .rotary = {.max_positions = 262144, .partial = 0.5}});
  const std::vector<bool> is_attention = read_attention_layers(config, a.layers);
  const AttentionShape attention = read_attention(config, a);
  const StateSpaceShape mixer =
      read_hybrid_mixer(config, config.positive("mamba_expand", 2) * a.hidden, "mamba_expand · hidden_size");
  const MlpShape mlp{.width = a.intermediate, .bias = config.flag("mlp_bias", false)};

  Builder& b = parts.builder;
  parts.embedding = b.parameter("model.embed_tokens.weight", {a.vocab, a.hidden});
  for (int64_t n = 0; n < a.layers; ++n) {
    const std::string prefix = fmt::format("model.layers.{}.", n);
    const auto make_mixer = [&]() -> std::unique_ptr<Block> {
      if (is_attention[size_t(n)]) {
        return std::make_unique<AttentionBlock>(b, prefix + "self_attn.", n, a.hidden, a.norm_eps, attention);
      }
      return std::make_unique<StateSpaceBlock>(b, prefix + "mamba.", n, a.hidden, a.norm_eps, mixer);
    };
    Layer& layer = parts.layers.emplace_back();
    layer.residuals.push_back(residual_around(b, prefix + "input_layernorm.weight", a, false, make_mixer));
    layer.residuals.push_back(residual_around(b, prefix + "pre_ff_layernorm.weight", a, false, [&] {
      return std::make_unique<MlpBlock>(b, prefix + "feed_forward.", a.hidden, mlp);
    }));
  }
  parts.final_norm = {b.parameter("model.final_layernorm.weight", {a.hidden}), a.norm_eps};
  parts.output = a.tied_embeddings ? parts.embedding : b.parameter("lm_head.weight", {a.vocab, a.hidden});
  return parts;
}

}  // namespace longstraw::core::model::mamba
