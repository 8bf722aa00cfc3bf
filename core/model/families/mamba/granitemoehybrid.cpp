#include "core/model/blocks/attention.h"
#include "core/model/blocks/experts.h"
#include "core/model/blocks/mlp.h"
#include "core/model/blocks/state_space.h"
#include "core/model/families/common.h"
#include "core/model/families/mamba/mamba.h"
#include "core/model/families/mamba/mixer_config.h"

#include <fmt/format.h>

namespace longstraw::core::model::mamba {

namespace {

// By layer; missing or null: Mamba-2 in all.
std::vector<bool> read_attention_layers(const JsonReader& config, int64_t layers) {
  std::vector<bool> attention(size_t(layers), false);
  const std::string_view key = config.has("layer_types") ? "layer_types" : "layers_block_type";
  if (!config.has(key)) return attention;
  const std::vector<std::string> types = with_new_names(config.texts(key));
  if (int64_t(types.size()) != layers) config.refuse(key, fmt::format("{} entries, one a layer", layers));
  for (size_t n = 0; n < types.size(); ++n) {
    if (types[n] != "full_attention" && types[n] != "linear_attention") {
      config.refuse(key, "full_attention or linear_attention for each layer");
    }
    attention[n] = types[n] == "full_attention";
  }
  return attention;
}

// "rope" or none, which some files spell "nope".
bool read_is_rotary(const JsonReader& config) {
  const std::string type = config.text("position_embedding_type", "nope");
  if (type != "rope" && type != "nope") config.refuse("position_embedding_type", "rope, nope or null");
  return type == "rope";
}

AttentionShape read_attention(const JsonReader& config, const Architecture& a, bool rotary) {
  const bool bias = config.flag("attention_bias", false);
  return {.heads = a.heads,
          .kv_heads = a.kv_heads,
          .head_dim = a.head_dim,
          .scale = config.number("attention_multiplier", 1.0),
          .query_key_value_bias = bias,
          .output_bias = bias,
          .rotary = rotary};
}

// None where there are no experts.
std::optional<ExpertsSpec> read_experts(const JsonReader& config, const Architecture& a) {
  const int64_t experts = config.count("num_local_experts", 8);
  if (experts == 0) return std::nullopt;
  ExpertsSpec spec{.hidden = a.hidden};
  spec.shape = {.experts = experts, .chosen = config.positive("num_experts_per_tok", 2), .width = a.intermediate};
  check_chosen(config, "num_experts_per_tok", spec.shape.chosen, experts);
  spec.routing.scores = Routing::Scores::kSoftmaxOfChosen;
  spec.names = {.router = "router.layer.weight", .fused_input = "input_linear.weight", .fused_output = "output_linear.weight"};
  return spec;
}

}  // namespace

DecoderParts granitemoehybrid(const JsonReader& config) {
  DecoderParts parts;
  Architecture& a = parts.architecture;
  a = read_sizes(config, {.intermediate = 11008, .rotary = {.max_positions = 2048}});
  const bool rotary = read_is_rotary(config);
  if (!rotary) a.rotary = {.max_positions = a.rotary.max_positions};
  const std::vector<bool> is_attention = read_attention_layers(config, a.layers);
  const AttentionShape attention = read_attention(config, a, rotary);
  const StateSpaceShape mixer =
      read_hybrid_mixer(config, config.positive("mamba_expand", 2) * a.hidden, "mamba_expand · hidden_size");
  const MlpShape shared{.width = config.positive("shared_intermediate_size", 1024), .fused = true};
  std::optional<ExpertsSpec> experts = read_experts(config, a);
  const double residual_multiplier = config.number("residual_multiplier", 1.0);
  parts.embedding_multiplier = config.number("embedding_multiplier", 1.0);
  parts.logit_multiplier = 1.0 / config.positive_number("logits_scaling", 1.0);

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
    Residual feed_forward;
    feed_forward.norm = {b.parameter(prefix + "post_attention_layernorm.weight", {a.hidden}), a.norm_eps};
    if (experts) {
      experts->layer = n;
      feed_forward.blocks.push_back(std::make_unique<ExpertsBlock>(b, prefix + "block_sparse_moe.", *experts));
    }
    feed_forward.blocks.push_back(std::make_unique<MlpBlock>(b, prefix + "shared_mlp.", a.hidden, shared));
    layer.residuals.push_back(std::move(feed_forward));
    for (Residual& residual : layer.residuals) residual.multiplier = residual_multiplier;
  }
  parts.final_norm = {b.parameter("model.norm.weight", {a.hidden}), a.norm_eps};
  parts.output = a.tied_embeddings ? parts.embedding : b.parameter("lm_head.weight", {a.vocab, a.hidden});
  return parts;
}

}  // namespace longstraw::core::model::mamba
