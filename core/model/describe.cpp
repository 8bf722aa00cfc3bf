#include "core/model/checkpoint.h"
#include "core/model/registry.h"

#include <fmt/format.h>

namespace longstraw::core::model {

namespace {

nlohmann::json describe_rotary(const Rotary& rotary) {
  nlohmann::json out{{"type", name_of(rotary.type)}, {"theta", rotary.theta}, {"dims", rotary.dims}};
  if (rotary.type != RotaryType::kDefault) {
    out["factor"] = rotary.factor;
    out["original_max_positions"] = rotary.original_max_positions;
  }
  return out;
}

nlohmann::json describe_architecture(const Architecture& a) {
  return {{"model_type", a.model_type},
          {"layers", a.layers},
          {"hidden_size", a.hidden},
          {"heads", a.heads},
          {"key_value_heads", a.kv_heads},
          {"head_dim", a.head_dim},
          {"intermediate_size", a.intermediate},
          {"vocab_size", a.vocab},
          {"norm_eps", a.norm_eps},
          {"tied_embeddings", a.tied_embeddings},
          {"query_key_value_bias", a.query_key_value_bias},
          {"attention_output_bias", a.attention_output_bias},
          {"mlp_bias", a.mlp_bias},
          {"query_key_norm", a.query_key_norm},
          {"max_positions", a.rotary.max_positions},
          {"rotary", describe_rotary(a.rotary)},
          {"eos_ids", a.eos_ids}};
}

// The dtype that most of the checkpoint's numbers are stored in, counting them by dtype.
StoredDtype main_dtype(const Checkpoint& checkpoint, nlohmann::json& elements_by_dtype) {
  std::map<StoredDtype, int64_t> elements;
  for (const auto& [name, entry] : checkpoint.tensors()) elements[entry.tensor->dtype] += element_count(entry.tensor->shape);
  StoredDtype main = StoredDtype::kF32;
  int64_t most = 0;
  for (const auto& [dtype, count] : elements) {
    elements_by_dtype[std::string(name_of(dtype))] = count;
    if (count > most) {
      most = count;
      main = dtype;
    }
  }
  return main;
}

}  // namespace

nlohmann::json describe(const std::filesystem::path& folder) {
  const DecoderParts parts = read_parts(folder);
  const Checkpoint checkpoint(folder);
  nlohmann::json elements_by_dtype = nlohmann::json::object();
  const int64_t number_bytes = bytes_per_element(main_dtype(checkpoint, elements_by_dtype));

  int64_t parameters = 0;
  for (const auto& parameter : parts.builder.parameters) parameters += element_count(parameter->shape);
  nlohmann::json files = nlohmann::json::array();
  for (const SafetensorsFile& file : checkpoint.files()) {
    files.push_back({{"name", file.path().filename().string()},
                     {"tensors", file.tensors().size()},
                     {"bytes", std::filesystem::file_size(file.path())}});
  }
  struct Kind {
    int64_t layers = 0;
    int64_t bytes = 0;
  };
  std::map<std::string, Kind> kinds;
  int64_t state_bytes = 0;
  for (const MixerState& state : parts.builder.states) {
    int64_t numbers = 0;
    for (const TokenRows& rows : state.rows) numbers += rows.heads * rows.width;
    kinds[state.kind].layers += 1;
    kinds[state.kind].bytes += numbers * number_bytes;
    state_bytes += numbers * number_bytes;
  }
  nlohmann::json layers = nlohmann::json::array();
  for (const auto& [kind, sum] : kinds) {
    layers.push_back({{"kind", kind}, {"layers", sum.layers}, {"state_bytes_per_token", sum.bytes}});
  }
  return {{"architecture", describe_architecture(parts.architecture)},
          {"parameters", parameters},
          {"elements_by_dtype", elements_by_dtype},
          {"files", files},
          {"state_bytes_per_token", state_bytes},
          {"layer_kinds", layers}};
}

}  // namespace longstraw::core::model
