#include "core/model/families/deepseek/deepseek.h"

#include "core/model/blocks/experts.h"
#include "core/model/blocks/latent_attention.h"
#include "core/model/blocks/mlp.h"
#include "core/model/families/deepseek/config.h"

#include <fmt/format.h>

namespace longstraw::core::model::deepseek {

namespace {

DecoderParts compose(Config config) {
  DecoderParts parts;
  const Architecture& a = config.architecture;
  Builder& b = parts.builder;
  parts.embedding = b.parameter("model.embed_tokens.weight", {a.vocab, a.hidden});
  for (int64_t n = 0; n < a.layers; ++n) {
    const LayerPlan& plan = config.layers[size_t(n)];
    const std::string prefix = fmt::format("model.layers.{}.", n);
    Layer layer;
    Residual& attention = layer.residuals.emplace_back();
    attention.norm = {b.parameter(prefix + "input_layernorm.weight", {a.hidden}), a.norm_eps};
    LatentAttentionShape shape = config.attention;
    shape.indexer = config.indexer;
    if (shape.indexer) shape.indexer->own = plan.has_indexer;
    attention.blocks.push_back(std::make_unique<LatentAttentionBlock>(b, prefix + "self_attn.", n, a.hidden, shape));

    Residual& mlp = layer.residuals.emplace_back();
    mlp.norm = {b.parameter(prefix + "post_attention_layernorm.weight", {a.hidden}), a.norm_eps};
    if (plan.has_experts) {
      const ExpertsSpec spec{.layer = n, .hidden = a.hidden, .shape = config.experts, .routing = config.routing};
      mlp.blocks.push_back(std::make_unique<ExpertsBlock>(b, prefix + "mlp.", spec));
    } else {
      mlp.blocks.push_back(std::make_unique<MlpBlock>(b, prefix + "mlp.", a.hidden, MlpShape{.width = a.intermediate}));
    }
    parts.layers.push_back(std::move(layer));
  }
  parts.final_norm = {b.parameter("model.norm.weight", {a.hidden}), a.norm_eps};
  parts.output = a.tied_embeddings ? parts.embedding : b.parameter("lm_head.weight", {a.vocab, a.hidden});
  parts.architecture = std::move(config.architecture);
  return parts;
}

}  // namespace

DecoderParts deepseek_v3(const JsonReader& config) { return compose(read_deepseek_v3(config)); }
DecoderParts deepseek_v32(const JsonReader& config) { return compose(read_deepseek_v32(config)); }
DecoderParts glm_moe_dsa(const JsonReader& config) { return compose(read_glm_moe_dsa(config)); }

CheckpointLayout layout(const Architecture& architecture) {
  CheckpointLayout layout;
  for (int64_t extra = 0; extra < architecture.prediction_layers; ++extra)
    layout.skipped.push_back(fmt::format("model.layers.{}.", architecture.layers + extra));
  return layout;
}

}  // namespace longstraw::core::model::deepseek
