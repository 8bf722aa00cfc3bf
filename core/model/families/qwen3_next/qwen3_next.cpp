#include "core/model/families/qwen3_next/qwen3_next.h"

#include "core/model/blocks/attention.h"
#include "core/model/blocks/delta_rule.h"
#include "core/model/blocks/experts.h"
#include "core/model/blocks/mlp.h"
#include "core/model/families/qwen3_next/config.h"

#include <fmt/format.h>

#include <cmath>

namespace longstraw::core::model::qwen3_next {

namespace {

std::unique_ptr<Block> mixer(Builder& b, const std::string& prefix, int64_t layer, const Config& c) {
  const Architecture& a = c.architecture;
  if (!c.attention[size_t(layer)]) {
    return std::make_unique<DeltaRuleBlock>(b, prefix + "linear_attn.", layer, a.hidden, a.norm_eps, c.delta_rule);
  }
  return std::make_unique<AttentionBlock>(b, prefix + "self_attn.", layer, a.hidden, a.norm_eps,
                                          AttentionShape{.heads = a.heads,
                                                         .kv_heads = a.kv_heads,
                                                         .head_dim = a.head_dim,
                                                         .scale = std::pow(double(a.head_dim), -0.5),
                                                         .query_key_value_bias = a.query_key_value_bias,
                                                         .output_bias = a.attention_output_bias,
                                                         .query_key_norm = true,
                                                         .zero_centred_norm = true,
                                                         .output_gate = true});
}

std::unique_ptr<Block> mlp(Builder& b, const std::string& prefix, int64_t layer, const Config& c) {
  const Architecture& a = c.architecture;
  if (!c.sparse[size_t(layer)]) {
    return std::make_unique<MlpBlock>(b, prefix + "mlp.", a.hidden, MlpShape{.width = a.intermediate});
  }
  return std::make_unique<ExpertsBlock>(
      b, prefix + "mlp.",
      ExpertsSpec{.layer = layer,
                  .hidden = a.hidden,
                  .shape = c.experts,
                  .routing = {.scores = Routing::Scores::kSoftmax, .normalised = c.normalised_routing},
                  .names = {.shared = "shared_expert.", .shared_gate = "shared_expert_gate.weight"}});
}

DecoderParts compose(Config c) {
  const Architecture& a = c.architecture;
  DecoderParts parts;
  Builder& b = parts.builder;
  parts.embedding = b.parameter("model.embed_tokens.weight", {a.vocab, a.hidden});
  for (int64_t n = 0; n < a.layers; ++n) {
    const std::string prefix = fmt::format("model.layers.{}.", n);
    Layer layer;
    layer.residuals.push_back(
        residual_around(b, prefix + "input_layernorm.weight", a, /*zero_centred=*/true, [&] { return mixer(b, prefix, n, c); }));
    layer.residuals.push_back(residual_around(b, prefix + "post_attention_layernorm.weight", a, /*zero_centred=*/true,
                                              [&] { return mlp(b, prefix, n, c); }));
    parts.layers.push_back(std::move(layer));
  }
  parts.final_norm = {b.parameter("model.norm.weight", {a.hidden}), a.norm_eps, /*zero_centred=*/true};
  parts.output = a.tied_embeddings ? parts.embedding : b.parameter("lm_head.weight", {a.vocab, a.hidden});
  parts.architecture = std::move(c.architecture);
  return parts;
}

}  // namespace

DecoderParts qwen3_next(const JsonReader& config) { return compose(read_qwen3_next(config)); }
DecoderParts qwen3_5_text(const JsonReader& config) { return compose(read_qwen3_5(config, /*moe=*/false)); }
DecoderParts qwen3_5(const JsonReader& config) { return compose(read_qwen3_5_multimodal(config, /*moe=*/false)); }
DecoderParts qwen3_5_moe_text(const JsonReader& config) { return compose(read_qwen3_5(config, /*moe=*/true)); }
DecoderParts qwen3_5_moe(const JsonReader& config) { return compose(read_qwen3_5_multimodal(config, /*moe=*/true)); }

CheckpointLayout layout(const Architecture&) {
  return {.prefixes = {{"model.language_model.", "model."}}, .skipped = {"model.visual.", "mtp."}};
}

}  // namespace longstraw::core::model::qwen3_next
