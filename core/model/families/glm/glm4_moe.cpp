#include "core/model/families/glm/glm4_moe.h"

#include "core/model/blocks/attention.h"
#include "core/model/blocks/experts.h"
#include "core/model/blocks/mlp.h"
#include "core/model/families/common.h"

#include <fmt/format.h>

#include <cmath>

namespace longstraw::core::model::glm {

namespace {

struct Config {
  Architecture architecture;
  int64_t dense_layers = 0;  // the first ones, without experts
  ExpertsShape experts;
  Routing routing;
};

Config read(const JsonReader& config) {
  Config c;
  c.architecture = read_sizes(
      config, {.kv_heads = 8, .intermediate = 10944, .norm_eps = 1e-5, .rotary = {.max_positions = 131072, .partial = 0.5}});
  c.architecture.query_key_value_bias = config.flag("attention_bias", false);
  c.architecture.query_key_norm = config.flag("use_qk_norm", false);
  c.dense_layers = config.count("first_k_dense_replace", 1);
  c.experts.experts = config.positive("n_routed_experts", 128);
  c.experts.chosen = config.positive("num_experts_per_tok", 8);
  check_chosen(config, "num_experts_per_tok", c.experts.chosen, c.experts.experts);
  c.experts.width = config.positive("moe_intermediate_size", 1408);
  c.experts.shared_width = c.experts.width * config.count("n_shared_experts", 1);
  c.routing = read_grouped_routing(config, c.experts.experts, c.experts.chosen, {.normalised = true});
  return c;
}

}  // namespace

DecoderParts glm4_moe(const JsonReader& config) {
  Config c = read(config);
  const Architecture& a = c.architecture;
  DecoderParts parts;
  Builder& b = parts.builder;
  parts.embedding = b.parameter("model.embed_tokens.weight", {a.vocab, a.hidden});
  for (int64_t n = 0; n < a.layers; ++n) {
    const std::string prefix = fmt::format("model.layers.{}.", n);
    Layer layer;
    layer.residuals.push_back(residual_around(b, prefix + "input_layernorm.weight", a, /*zero_centred=*/false, [&] {
      return std::make_unique<AttentionBlock>(b, prefix + "self_attn.", n, a.hidden, a.norm_eps,
                                              AttentionShape{.heads = a.heads,
                                                             .kv_heads = a.kv_heads,
                                                             .head_dim = a.head_dim,
                                                             .scale = std::pow(double(a.head_dim), -0.5),
                                                             .query_key_value_bias = a.query_key_value_bias,
                                                             .query_key_norm = a.query_key_norm});
    }));
    layer.residuals.push_back(
        residual_around(b, prefix + "post_attention_layernorm.weight", a, /*zero_centred=*/false, [&]() -> std::unique_ptr<Block> {
          if (n < c.dense_layers) {
            return std::make_unique<MlpBlock>(b, prefix + "mlp.", a.hidden, MlpShape{.width = a.intermediate});
          }
          return std::make_unique<ExpertsBlock>(
              b, prefix + "mlp.", ExpertsSpec{.layer = n, .hidden = a.hidden, .shape = c.experts, .routing = c.routing});
        }));
    parts.layers.push_back(std::move(layer));
  }
  parts.final_norm = {b.parameter("model.norm.weight", {a.hidden}), a.norm_eps};
  parts.output = a.tied_embeddings ? parts.embedding : b.parameter("lm_head.weight", {a.vocab, a.hidden});
  parts.architecture = std::move(c.architecture);
  return parts;
}

CheckpointLayout glm4_moe_layout(const Architecture& architecture) {
  return {.skipped = {fmt::format("model.layers.{}.", architecture.layers)}};
}

}  // namespace longstraw::core::model::glm
