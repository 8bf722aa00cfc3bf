#include "compare/mixers.h"

#include <algorithm>

#include "compare/names.h"

namespace longstraw::compare {
namespace {

bool begins(const std::string& text, const std::string& part) { return text.rfind(part, 0) == 0; }

const ParameterMeasure* find_kind(const Parameters& parameters, const std::string& kind) {
  for (const auto* p : parameters) {
    if (kind_of(p->name) == kind) return p;
  }
  return nullptr;
}

const ParameterMeasure* find_ending(const Parameters& parameters, const std::string& ending) {
  for (const auto* p : parameters) {
    if (p->name.ends_with(ending) && p->name.find("indexer") == std::string::npos) return p;
  }
  return nullptr;
}

std::int64_t rows_of(const ParameterMeasure* p) { return p == nullptr || p->shape.empty() ? 0 : p->shape[0]; }

// Qwen3-Next stacks [q | k | v | z] of each key head; how many key heads there are the shapes leave open.
std::vector<std::vector<RowRange>> grouped_queries(std::int64_t query_rows, std::int64_t value_rows, std::int64_t value_heads) {
  std::vector<std::vector<RowRange>> layouts;
  for (std::int64_t heads = 1; heads <= value_heads; ++heads) {
    if (value_heads % heads != 0 || query_rows % heads != 0) continue;
    const std::int64_t head = query_rows / heads, block = 2 * head + 2 * value_rows / heads;
    std::vector<RowRange> rows;
    for (std::int64_t h = 0; h < heads; ++h) rows.push_back({h * block, head});
    layouts.push_back(std::move(rows));
  }
  return layouts;
}

void locate_window_readers(RecurrentMixer& mixer, const Parameters& parameters) {
  const auto* convolution = find_kind(parameters, mixer.prefix + "conv1d.weight");
  const auto* out = find_kind(parameters, mixer.prefix + "out_proj.weight");
  if (convolution == nullptr || out == nullptr || out->shape.size() != 2) return;
  const std::int64_t channels = rows_of(convolution), values = out->shape[1];  // values: of all heads, the output's input
  const std::int64_t reader = (channels - values) / 2;                         // queries = keys; B = C
  if (reader <= 0 || (channels - values) % 2 != 0) return;
  if (const auto* all = find_kind(parameters, mixer.prefix + "in_proj_qkv.weight"); rows_of(all) == channels) {
    mixer.window_input = all;
    mixer.window_readers = {{{0, reader}}};
  } else if (const auto* grouped = find_kind(parameters, mixer.prefix + "in_proj_qkvz.weight");
             rows_of(grouped) == channels + values) {
    mixer.window_input = grouped;
    mixer.window_readers = grouped_queries(reader, values, rows_of(mixer.decay.front()));
  } else if (const auto* packed = find_kind(parameters, mixer.prefix + "in_proj.weight");
             packed != nullptr && rows_of(packed) == values + channels + rows_of(mixer.decay.front())) {
    mixer.window_input = packed;  // z | x | B | C | dt
    mixer.window_readers = {{{2 * values + reader, reader}}};
  }
}

}  // namespace

Parameters parameters_of_layer(const StepMeasure& measure, std::int64_t layer) {
  Parameters result;
  for (const auto& p : measure.parameters) {
    if (layer_of(p.name) == layer) result.push_back(&p);
  }
  return result;
}

std::optional<RecurrentMixer> recurrent_mixer(const StepMeasure& measure, std::int64_t layer) {
  const Parameters parameters = parameters_of_layer(measure, layer);
  const auto* decay = find_ending(parameters, "A_log");
  if (decay == nullptr) return std::nullopt;
  RecurrentMixer mixer;
  mixer.layer = layer;
  const std::string kind = kind_of(decay->name);
  mixer.prefix = kind.substr(0, kind.size() - std::string("A_log").size());
  mixer.decay.push_back(decay);
  for (const auto* p : parameters) {
    const std::string own = kind_of(p->name);
    if (!begins(own, mixer.prefix)) continue;
    const std::string part = own.substr(mixer.prefix.size());
    if (begins(part, "conv1d")) {
      mixer.convolution.push_back(p);
    } else if (part == "dt_bias") {
      mixer.decay.push_back(p);
    } else if (begins(part, "in_proj") && !begins(part, "in_proj_z")) {
      mixer.input.push_back(p);
    } else if (begins(part, "norm") || begins(part, "out_proj") || begins(part, "in_proj_z") || part == "D") {
      mixer.readers.push_back(p);
    }
  }
  locate_window_readers(mixer, parameters);
  return mixer;
}

std::optional<LatentMixer> latent_mixer(const StepMeasure& measure, std::int64_t layer) {
  const Parameters parameters = parameters_of_layer(measure, layer);
  LatentMixer mixer{.layer = layer,
                    .down = find_ending(parameters, "kv_a_proj_with_mqa.weight"),
                    .norm = find_ending(parameters, "kv_a_layernorm.weight"),
                    .expansion = find_ending(parameters, "kv_b_proj.weight")};
  if (mixer.down == nullptr || mixer.norm == nullptr || mixer.expansion == nullptr) return std::nullopt;
  mixer.latent_rows = mixer.norm->shape.empty() ? 0 : mixer.norm->shape[0];
  if (mixer.latent_rows <= 0 || mixer.latent_rows >= rows_of(mixer.down)) return std::nullopt;
  return mixer;
}

std::optional<AttentionMixer> attention_mixer(const StepMeasure& measure, std::int64_t layer) {
  const Parameters parameters = parameters_of_layer(measure, layer);
  const AttentionMixer mixer{
      .layer = layer, .key = find_ending(parameters, "k_proj.weight"), .value = find_ending(parameters, "v_proj.weight")};
  if (mixer.key == nullptr || mixer.value == nullptr) return std::nullopt;
  return mixer;
}

}  // namespace longstraw::compare
