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

}  // namespace

nlohmann::json describe(const std::filesystem::path& folder) {
  const Architecture architecture = read_architecture(folder);
  const Family& family = family_of(architecture.model_type, (folder / "config.json").string());
  const Checkpoint checkpoint(folder);

  int64_t parameters = 0;
  for (const auto& [name, shape] : family.parameters(architecture)) parameters += element_count(shape);

  std::map<StoredDtype, int64_t> elements;
  for (const auto& [name, entry] : checkpoint.tensors()) elements[entry.tensor->dtype] += element_count(entry.tensor->shape);
  nlohmann::json elements_by_dtype = nlohmann::json::object();
  // The prompt state of a run in the dtype that most weights are stored in.
  int64_t number_bytes = 0, most = 0;
  for (const auto& [dtype, count] : elements) {
    elements_by_dtype[std::string(name_of(dtype))] = count;
    if (count > most) {
      most = count;
      number_bytes = bytes_per_element(dtype);
    }
  }
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
  for (const LayerState& state : family.states(architecture)) {
    kinds[state.kind].layers += 1;
    kinds[state.kind].bytes += state.numbers_per_token * number_bytes;
    state_bytes += state.numbers_per_token * number_bytes;
  }
  nlohmann::json layers = nlohmann::json::array();
  for (const auto& [kind, sum] : kinds) {
    layers.push_back({{"kind", kind}, {"layers", sum.layers}, {"state_bytes_per_token", sum.bytes}});
  }
  return {{"architecture", describe_architecture(architecture)},
          {"parameters", parameters},
          {"elements_by_dtype", elements_by_dtype},
          {"files", files},
          {"state_bytes_per_token", state_bytes},
          {"layer_kinds", layers}};
}

}  // namespace longstraw::core::model
