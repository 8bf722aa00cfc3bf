#include "core/model/families/common.h"

#include <fmt/format.h>

namespace longstraw::core::model {

void refuse_unsupported(const JsonReader& config) {
  if (config.text("hidden_act", "silu") != "silu") config.unsupported("hidden_act", "only silu is supported");
  if (config.number("attention_dropout", 0) != 0) config.unsupported("attention_dropout", "only 0 is supported");
}

Architecture read_sizes(const JsonReader& config, const SizeDefaults& defaults) {
  refuse_unsupported(config);
  Architecture a;
  a.layers = config.positive("num_hidden_layers");
  a.hidden = config.positive("hidden_size");
  a.heads = config.positive("num_attention_heads");
  if (!defaults.intermediate) a.intermediate = config.positive("intermediate_size");
  else if (*defaults.intermediate > 0) a.intermediate = config.positive("intermediate_size", *defaults.intermediate);
  a.vocab = config.positive("vocab_size");
  a.norm_eps = config.positive_number("rms_norm_eps", defaults.norm_eps);
  a.tied_embeddings = config.flag("tie_word_embeddings", defaults.tied_embeddings);

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
  a.rotary = read_rotary(config, a.head_dim, defaults.rotary);
  return a;
}

void check_chosen(const JsonReader& config, std::string_view key, int64_t chosen, int64_t experts) {
  if (chosen > experts) config.refuse(key, fmt::format("at most the number of experts ({}); it is {}", experts, chosen));
}

Routing read_grouped_routing(const JsonReader& config, int64_t experts, int64_t chosen, Routing defaults) {
  Routing routing{.scores = Routing::Scores::kSigmoid, .wide = true, .correction = true};
  routing.groups = config.positive("n_group", defaults.groups);
  routing.chosen_groups = config.positive("topk_group", defaults.chosen_groups);
  routing.normalised = config.flag("norm_topk_prob", defaults.normalised);
  routing.sum_guard = 1e-20;
  routing.scale = config.number("routed_scaling_factor", defaults.scale);
  if (experts % routing.groups != 0 || experts / routing.groups < 2) {
    config.refuse("n_group", fmt::format("equal groups of at least two of the {} experts; it is {}", experts, routing.groups));
  }
  const int64_t candidates = routing.chosen_groups * (experts / routing.groups);
  if (routing.chosen_groups > routing.groups || candidates < chosen) {
    config.refuse("topk_group", fmt::format("at most n_group ({}), and groups with the {} experts that are chosen; it is {}",
                                            routing.groups, chosen, routing.chosen_groups));
  }
  return routing;
}

}  // namespace longstraw::core::model
