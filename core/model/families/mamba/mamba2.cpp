#include "core/model/blocks/state_space.h"
#include "core/model/families/common.h"
#include "core/model/families/mamba/mamba.h"
#include "core/model/families/mamba/mixer_config.h"

#include <fmt/format.h>

namespace longstraw::core::model::mamba {

namespace {

Architecture read_mamba2_sizes(const JsonReader& config) {
  refuse_unsupported(config);
  Architecture a;
  a.layers = config.positive("num_hidden_layers");
  a.hidden = config.positive("hidden_size");
  a.vocab = config.positive("vocab_size");
  a.norm_eps = config.positive_number("layer_norm_epsilon", 1e-5);
  a.tied_embeddings = config.flag("tie_word_embeddings", false);
  a.window.assign(size_t(a.layers), std::nullopt);
  return a;
}

StateSpaceShape read_mamba2_mixer(const JsonReader& config, const Architecture& a) {
  StateSpaceShape shape;
  shape.heads = config.positive("num_heads", 128);
  shape.head_dim = config.positive("head_dim", 64);
  shape.groups = config.positive("n_groups", 8);
  shape.state = config.positive("state_size", 128);
  shape.kernel = config.positive("conv_kernel", 4);
  shape.convolution_bias = config.flag("use_conv_bias", true);
  shape.input_bias = shape.output_bias = config.flag("use_bias", false);
  read_time_step_limit(config, shape);
  check_groups(config, "n_groups", shape);
  const int64_t width = config.positive("expand", 2) * a.hidden;
  if (shape.heads * shape.head_dim != width) {
    config.refuse("num_heads", fmt::format("num_heads · head_dim = expand · hidden_size ({}); it is {} · {}", width, shape.heads,
                                           shape.head_dim));
  }
  return shape;
}

}  // namespace

DecoderParts mamba2(const JsonReader& config) {
  DecoderParts parts;
  Architecture& a = parts.architecture;
  a = read_mamba2_sizes(config);
  const StateSpaceShape mixer = read_mamba2_mixer(config, a);
  const bool wide_residual = config.flag("residual_in_fp32", true);
  Builder& b = parts.builder;
  parts.embedding = b.parameter("backbone.embeddings.weight", {a.vocab, a.hidden});
  for (int64_t n = 0; n < a.layers; ++n) {
    const std::string prefix = fmt::format("backbone.layers.{}.", n);
    Residual residual = residual_around(b, prefix + "norm.weight", a, false, [&] {
      return std::make_unique<StateSpaceBlock>(b, prefix + "mixer.", n, a.hidden, a.norm_eps, mixer);
    });
    residual.wide = wide_residual;
    parts.layers.emplace_back().residuals.push_back(std::move(residual));
  }
  parts.final_norm = {b.parameter("backbone.norm_f.weight", {a.hidden}), a.norm_eps};
  parts.output = a.tied_embeddings ? parts.embedding : b.parameter("lm_head.weight", {a.vocab, a.hidden});
  return parts;
}

// The first releases called the embedding differently.
CheckpointLayout mamba2_layout(const Architecture&) { return {.prefixes = {{"backbone.embedding.", "backbone.embeddings."}}}; }

}  // namespace longstraw::core::model::mamba
