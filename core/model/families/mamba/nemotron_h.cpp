#include "core/model/blocks/attention.h"
#include "core/model/blocks/experts.h"
#include "core/model/blocks/mlp.h"
#include "core/model/blocks/state_space.h"
#include "core/model/families/common.h"
#include "core/model/families/mamba/mamba.h"
#include "core/model/families/mamba/mixer_config.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

namespace longstraw::core::model::mamba {

namespace {

// What a layer holds: "linear_attention" (Mamba-2), "full_attention", "mlp" or "moe".
using LayerTypes = std::vector<std::string>;

// One letter a layer, as the published configurations have it.
LayerTypes from_pattern(const JsonReader& config, std::string_view key) {
  LayerTypes types;
  for (const char letter : config.text(key)) {
    if (letter == 'M') types.emplace_back("linear_attention");
    else if (letter == '*') types.emplace_back("full_attention");
    else if (letter == '-') types.emplace_back("mlp");
    else if (letter == 'E') types.emplace_back("moe");
    else config.refuse(key, "M, *, - and E, one a layer");
  }
  if (types.empty()) config.refuse(key, "a letter for each layer");
  return types;
}

LayerTypes read_layer_types(const JsonReader& config) {
  const std::string_view key = config.has("layers_block_type") ? "layers_block_type" : "layer_types";
  if (!config.has(key)) {
    if (config.has("hybrid_override_pattern")) return from_pattern(config, "hybrid_override_pattern");
    return {"linear_attention", "moe", "full_attention", "mlp"};
  }
  const LayerTypes types = with_new_names(config.texts(key));
  for (const std::string& type : types) {
    if (type != "linear_attention" && type != "full_attention" && type != "mlp" && type != "moe") {
      config.refuse(key, "linear_attention, full_attention, mlp or moe for each layer");
    }
  }
  if (types.empty()) config.refuse(key, "at least one layer");
  return types;
}

Architecture read_nemotron_sizes(const JsonReader& config, const LayerTypes& types) {
  if (config.flag("tie_word_embeddings", false)) {
    config.unsupported("tie_word_embeddings", "nemotron_h has an output weight of its own");
  }
  if (config.flag("attention_bias", false)) config.unsupported("attention_bias", "attention in nemotron_h has no biases");
  if (config.has("sliding_window")) config.unsupported("sliding_window", "attention in nemotron_h has no window");
  if (config.number("hidden_dropout", 0) != 0) config.unsupported("hidden_dropout", "only 0 is supported");
  if (config.text("mamba_hidden_act", "silu") != "silu") config.unsupported("mamba_hidden_act", "only silu is supported");
  // The layers are those that are listed; num_hidden_layers is a leftover that the class does not read.
  nlohmann::json with_layers = config.json();
  with_layers["num_hidden_layers"] = types.size();
  Architecture a = read_sizes(JsonReader(config.file(), with_layers), {.kv_heads = 8, .head_dim = 128, .intermediate = 21504});
  a.norm_eps = config.positive_number("layer_norm_epsilon", 1e-5);
  a.rotary = {.max_positions = config.positive("max_position_embeddings", 4096)};
  return a;
}

StateSpaceShape read_nemotron_mixer(const JsonReader& config) {
  // The older name of a key counts where it is there.
  const auto either = [&](const char* older, const char* key) { return config.is_present(older) ? older : key; };
  StateSpaceShape shape;
  shape.heads = config.positive("mamba_num_heads", 128);
  shape.head_dim = config.positive("mamba_head_dim", 64);
  const char* groups = either("mamba_n_groups", "n_groups");
  shape.groups = config.positive(groups, 8);
  shape.state = config.positive("ssm_state_size", 128);
  shape.kernel = config.positive(either("mamba_d_conv", "conv_kernel"), 4);
  shape.convolution_bias = config.flag(either("mamba_conv_bias", "use_conv_bias"), true);
  shape.input_bias = shape.output_bias = config.flag("use_bias", false);
  shape.norm = StateSpaceShape::Norm::kGroups;
  // The class limits time steps from below by time_step_min, and does not read time_step_limit.
  shape.time_step_min = config.number(either("mamba_dt_min", "time_step_min"), 0.001);
  shape.time_step_max = std::numeric_limits<double>::infinity();
  check_groups(config, groups, shape);
  return shape;
}

Activation read_activation(const JsonReader& config) {
  const std::string name = config.text("mlp_hidden_act", "relu2");
  if (name == "relu2") return Activation::kRelu2;
  if (name == "silu") return Activation::kSilu;
  config.unsupported("mlp_hidden_act", "only relu2 and silu are supported");
}

ExpertsSpec read_experts(const JsonReader& config, const Architecture& a, Activation activation) {
  ExpertsSpec spec{.hidden = a.hidden, .bias = config.flag("mlp_bias", false)};
  const char* experts = config.has("num_local_experts") ? "num_local_experts" : "n_routed_experts";
  spec.shape = {.experts = config.positive(experts, 8),
                .chosen = config.positive("num_experts_per_tok", 2),
                .width = config.positive("moe_intermediate_size", 7688),
                .shared_width = config.positive("moe_shared_expert_intermediate_size", 7688),
                .latent = config.positive("moe_latent_size", 0),
                .activation = activation,
                .gated = false};
  check_chosen(config, "num_experts_per_tok", spec.shape.chosen, spec.shape.experts);
  spec.routing = read_grouped_routing(config, spec.shape.experts, spec.shape.chosen, {.normalised = true});
  return spec;
}

struct Mixers {
  StateSpaceShape state_space;
  AttentionShape attention;
  MlpShape mlp;
  std::optional<ExpertsSpec> experts;  // where a layer has them
};

std::unique_ptr<Block> make_block(Builder& b, const std::string& prefix, int64_t layer, const Architecture& a,
                                  const std::string& type, const Mixers& mixers) {
  if (type == "linear_attention") {
    return std::make_unique<StateSpaceBlock>(b, prefix, layer, a.hidden, a.norm_eps, mixers.state_space);
  }
  if (type == "full_attention") {
    return std::make_unique<AttentionBlock>(b, prefix, layer, a.hidden, a.norm_eps, mixers.attention);
  }
  if (type == "mlp") return std::make_unique<MlpBlock>(b, prefix, a.hidden, mixers.mlp);
  ExpertsSpec spec = *mixers.experts;
  spec.layer = layer;
  return std::make_unique<ExpertsBlock>(b, prefix, spec);
}

}  // namespace

DecoderParts nemotron_h(const JsonReader& config) {
  const LayerTypes types = read_layer_types(config);
  DecoderParts parts;
  Architecture& a = parts.architecture;
  a = read_nemotron_sizes(config, types);
  const Activation activation = read_activation(config);
  Mixers mixers{.state_space = read_nemotron_mixer(config),
                .attention = {.heads = a.heads,
                              .kv_heads = a.kv_heads,
                              .head_dim = a.head_dim,
                              .scale = std::pow(double(a.head_dim), -0.5),
                              .rotary = false},
                .mlp = {.width = a.intermediate, .activation = activation, .gated = false, .bias = config.flag("mlp_bias", false)}};
  if (std::find(types.begin(), types.end(), "moe") != types.end()) mixers.experts = read_experts(config, a, activation);

  Builder& b = parts.builder;
  parts.embedding = b.parameter("backbone.embeddings.weight", {a.vocab, a.hidden});
  for (int64_t n = 0; n < a.layers; ++n) {
    const std::string prefix = fmt::format("backbone.layers.{}.", n);
    parts.layers.emplace_back().residuals.push_back(residual_around(
        b, prefix + "norm.weight", a, false, [&] { return make_block(b, prefix + "mixer.", n, a, types[size_t(n)], mixers); }));
  }
  parts.final_norm = {b.parameter("backbone.norm_f.weight", {a.hidden}), a.norm_eps};
  parts.output = b.parameter("lm_head.weight", {a.vocab, a.hidden});
  return parts;
}

// Layers for multi-token prediction are not run. The class in transformers has the trunk under "model.".
CheckpointLayout nemotron_h_layout(const Architecture&) { return {.modules = {{"backbone.", "model."}}, .skipped = {"mtp."}}; }

}  // namespace longstraw::core::model::mamba
