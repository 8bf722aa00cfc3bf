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

// `wanted` multipliers; missing or null: 1 each.
std::vector<double> read_multipliers(const JsonReader& config, std::string_view key, size_t wanted) {
  if (!config.has(key)) return std::vector<double>(wanted, 1.0);
  std::vector<double> multipliers = config.numbers(key);
  const bool finite = std::all_of(multipliers.begin(), multipliers.end(), [](double m) { return std::isfinite(m); });
  if (multipliers.size() != wanted || !finite) config.refuse(key, fmt::format("{} numbers", wanted));
  return multipliers;
}

AttentionShape read_attention(const JsonReader& config, const Architecture& a) {
  const bool bias = config.flag("attention_bias", false);
  return {.heads = a.heads,
          .kv_heads = a.kv_heads,
          .head_dim = a.head_dim,
          .scale = std::pow(double(a.head_dim), -0.5),
          .query_key_value_bias = bias,
          .output_bias = bias,
          .input_multiplier = config.number("attention_in_multiplier", 1.0),
          .key_multiplier = config.number("key_multiplier", 1.0),
          .output_multiplier = config.number("attention_out_multiplier", 1.0)};
}

StateSpaceShape read_mixer(const JsonReader& config, const Architecture& a) {
  // Missing: 1024. Null: expand · hidden_size.
  const bool derived = config.is_present("mamba_d_ssm") && !config.has("mamba_d_ssm");
  StateSpaceShape shape =
      derived ? read_hybrid_mixer(config, config.positive("mamba_expand", 2) * a.hidden, "mamba_expand · hidden_size")
              : read_hybrid_mixer(config, config.positive("mamba_d_ssm", 1024), "mamba_d_ssm");
  shape.output_bias = config.flag("projectors_bias", false);
  using Norm = StateSpaceShape::Norm;
  shape.norm = config.flag("mamba_rms_norm", false) ? Norm::kGroups : Norm::kNone;
  shape.norm_before_gate = config.flag("mamba_norm_before_gate", true);
  shape.input_multiplier = config.number("ssm_in_multiplier", 1.0);
  const std::vector<double> multipliers = read_multipliers(config, "ssm_multipliers", shape.projection_multipliers.size());
  std::copy(multipliers.begin(), multipliers.end(), shape.projection_multipliers.begin());
  shape.output_multiplier = config.number("ssm_out_multiplier", 1.0);
  return shape;
}

MlpShape read_mlp(const JsonReader& config, const Architecture& a) {
  const std::vector<double> multipliers = read_multipliers(config, "mlp_multipliers", 2);
  return {.width = a.intermediate,
          .bias = config.flag("mlp_bias", false),
          .gate_multiplier = multipliers[0],
          .output_multiplier = multipliers[1]};
}

}  // namespace

DecoderParts falcon_h1(const JsonReader& config) {
  DecoderParts parts;
  Architecture& a = parts.architecture;
  a = read_sizes(config, {.kv_heads = 8, .norm_eps = 1e-5, .rotary = {.max_positions = 8192}});
  const AttentionShape attention = read_attention(config, a);
  const StateSpaceShape mixer = read_mixer(config, a);
  const MlpShape mlp = read_mlp(config, a);
  parts.embedding_multiplier = config.number("embedding_multiplier", 1.0);
  parts.logit_multiplier = config.number("lm_head_multiplier", 1.0);

  Builder& b = parts.builder;
  parts.embedding = b.parameter("model.embed_tokens.weight", {a.vocab, a.hidden});
  for (int64_t n = 0; n < a.layers; ++n) {
    const std::string prefix = fmt::format("model.layers.{}.", n);
    Layer& layer = parts.layers.emplace_back();
    Residual& mixers = layer.residuals.emplace_back(residual_around(b, prefix + "input_layernorm.weight", a, false, [&] {
      return std::make_unique<StateSpaceBlock>(b, prefix + "mamba.", n, a.hidden, a.norm_eps, mixer);
    }));
    mixers.blocks.push_back(std::make_unique<AttentionBlock>(b, prefix + "self_attn.", n, a.hidden, a.norm_eps, attention));
    layer.residuals.push_back(residual_around(b, prefix + "pre_ff_layernorm.weight", a, false, [&] {
      return std::make_unique<MlpBlock>(b, prefix + "feed_forward.", a.hidden, mlp);
    }));
  }
  parts.final_norm = {b.parameter("model.final_layernorm.weight", {a.hidden}), a.norm_eps};
  parts.output = a.tied_embeddings ? parts.embedding : b.parameter("lm_head.weight", {a.vocab, a.hidden});
  return parts;
}

}  // namespace longstraw::core::model::mamba
