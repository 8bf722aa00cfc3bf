#include "core/model/describe.h"

#include "core/model/checkpoint.h"
#include "core/model/registry.h"
#include "core/model/state_size.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace longstraw::core::model {

namespace {

using Json = nlohmann::ordered_json;

Json describe_rotary(const Rotary& rotary) {
  Json out{{"type", name_of(rotary.type)}, {"theta", rotary.theta}, {"dims", rotary.dims}};
  if (rotary.type != RotaryType::kDefault) {
    out["factor"] = rotary.factor;
    out["original_max_positions"] = rotary.original_max_positions;
  }
  return out;
}

Json describe_architecture(const Architecture& a) {
  Json out{{"model_type", a.model_type}, {"layers", a.layers}, {"hidden_size", a.hidden}};
  if (a.heads > 0) {
    out.update(Json{{"heads", a.heads},
                    {"key_value_heads", a.kv_heads},
                    {"head_dim", a.head_dim},
                    {"query_key_value_bias", a.query_key_value_bias},
                    {"attention_output_bias", a.attention_output_bias},
                    {"query_key_norm", a.query_key_norm}});
  }
  if (a.intermediate > 0) out.update(Json{{"intermediate_size", a.intermediate}, {"mlp_bias", a.mlp_bias}});
  out.update(Json{{"vocab_size", a.vocab}, {"norm_eps", a.norm_eps}, {"tied_embeddings", a.tied_embeddings}});
  if (a.rotary.max_positions > 0) out["max_positions"] = a.rotary.max_positions;
  if (a.rotary.dims > 0) out["rotary"] = describe_rotary(a.rotary);
  out["eos_ids"] = a.eos_ids;
  return out;
}

// Numbers of one routed expert.
int64_t expert_parameters(const ExpertsShape& shape, int64_t hidden) {
  return (shape.gated ? 3 : 2) * shape.width * (shape.latent > 0 ? shape.latent : hidden);
}

template <class Visit>
void for_each_experts_block(const DecoderParts& parts, Visit visit) {
  for (const Layer& layer : parts.layers) {
    for (const Residual& residual : layer.residuals) {
      for (const auto& block : residual.blocks) {
        const BlockShape shape = block->shape();
        if (const auto* experts = std::get_if<ExpertsShape>(&shape)) visit(*experts);
      }
    }
  }
}

// One row for layers with the same experts.
Json describe_experts(const DecoderParts& parts) {
  Json kinds = Json::array();
  for_each_experts_block(parts, [&](const ExpertsShape& shape) {
    const Json kind{{"layers", 1},
                    {"experts", shape.experts},
                    {"chosen_per_token", shape.chosen},
                    {"width", shape.width},
                    {"shared_width", shape.shared_width},
                    {"parameters_of_one", expert_parameters(shape, parts.architecture.hidden)}};
    const auto same = [&](Json other) {
      other["layers"] = 1;
      return other == kind;
    };
    const auto known = std::find_if(kinds.begin(), kinds.end(), same);
    if (known == kinds.end()) kinds.push_back(kind);
    else (*known)["layers"] = (*known)["layers"].get<int64_t>() + 1;
  });
  return kinds;
}

struct DtypeName {
  StoredDtype stored;
  c10::ScalarType dtype;
  const char* name;
};
constexpr std::array kDtypes{
    DtypeName{StoredDtype::kF64, c10::kDouble, "float64"}, DtypeName{StoredDtype::kF32, c10::kFloat, "float32"},
    DtypeName{StoredDtype::kF16, c10::kHalf, "float16"}, DtypeName{StoredDtype::kBf16, c10::kBFloat16, "bfloat16"}};

// config.json's own, or that of its text part. A model in another dtype is run in bfloat16.
c10::ScalarType stated_dtype(const JsonReader& config) {
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (!config.has(key)) continue;
    const std::string name = config.text(key);
    const auto known = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeName& d) { return name == d.name; });
    if (known == kDtypes.end()) config.refuse(key, "float32, float64, float16 or bfloat16");
    return known->dtype;
  }
  return config.has("text_config") ? stated_dtype(config.section("text_config")) : c10::kBFloat16;
}

struct Files {
  Json files = Json::array();
  Json elements_by_dtype = Json::object();
  std::optional<StoredDtype> main;  // dtype of most numbers; none: there are no files
};

Files read_files(const std::filesystem::path& folder) {
  Files out;
  const auto is_tensor_file = [](const auto& entry) {
    const std::string name = entry.path().filename().string();
    return name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
  };
  const std::filesystem::directory_iterator entries(folder);
  if (std::none_of(begin(entries), end(entries), is_tensor_file)) return out;
  const Checkpoint checkpoint(folder);
  for (const SafetensorsFile& file : checkpoint.files()) {
    out.files.push_back({{"name", file.path().filename().string()},
                         {"tensors", file.tensors().size()},
                         {"bytes", std::filesystem::file_size(file.path())}});
  }
  std::map<StoredDtype, int64_t> elements;
  for (const auto& [name, entry] : checkpoint.tensors()) elements[entry.tensor->dtype] += element_count(entry.tensor->shape);
  int64_t most = 0;
  for (const auto& [dtype, count] : elements) {
    out.elements_by_dtype[std::string(name_of(dtype))] = count;
    if (count > most) {
      most = count;
      out.main = dtype;
    }
  }
  return out;
}

c10::ScalarType dtype_of_run(const Files& files, const JsonReader& config, const DescribeOptions& options) {
  if (options.dtype) return *options.dtype;
  const auto stored = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeName& d) { return files.main == d.stored; });
  return stored != kDtypes.end() ? stored->dtype : stated_dtype(config);
}

Json describe_kinds(const std::vector<StateSize>& sizes, bool with_total) {
  Json kinds = Json::array();
  for (const StateSize& size : sizes) {
    Json kind{{"kind", size.kind},
              {"layers", size.layers},
              {"state_bytes_per_token", size.bytes_per_token},
              {"state_fixed_bytes", size.fixed_bytes}};
    if (with_total) kind["state_bytes"] = size.bytes;
    kinds.push_back(std::move(kind));
  }
  return kinds;
}

Json describe_prefix(const DecoderParts& parts, const StateSize& all, int64_t tokens) {
  return {{"tokens", tokens},
          {"state_bytes", all.bytes},
          {"exact_gradient",
           {{"state_bytes", all.exact_bytes},
            {"adjoint_bytes", all.adjoint_bytes},
            {"bytes_per_segment_border", all.border_bytes},
            {"expert_choice_bytes", tokens * expert_choice_bytes(parts.builder.routers)}}}};
}

}  // namespace

ParameterCounts count_parameters(const DecoderParts& parts) {
  ParameterCounts counts;
  for (const auto& parameter : parts.builder.parameters) {
    if (parameter->trained) counts.total += element_count(parameter->shape);
  }
  counts.active = counts.total;
  for_each_experts_block(parts, [&](const ExpertsShape& shape) {
    counts.active -= (shape.experts - shape.chosen) * expert_parameters(shape, parts.architecture.hidden);
  });
  return counts;
}

Json describe(const std::filesystem::path& folder, const DescribeOptions& options) {
  const DecoderParts parts = read_parts(folder);
  const Files files = read_files(folder);
  const c10::ScalarType dtype = dtype_of_run(files, read_json((folder / "config.json").string()), options);
  const auto name = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeName& d) { return d.dtype == dtype; });
  const ParameterCounts parameters = count_parameters(parts);

  Json out{{"architecture", describe_architecture(parts.architecture)}, {"parameters", parameters.total}};
  if (!parts.builder.routers.empty()) {
    out["parameters_active_per_token"] = parameters.active;
    out["experts"] = describe_experts(parts);
  }
  if (files.main) {
    out["elements_by_dtype"] = files.elements_by_dtype;
    out["files"] = files.files;
  }
  const std::vector<StateSize> sizes = state_sizes(parts.builder.states, dtype, options.tokens.value_or(0));
  const StateSize all = total(sizes);
  out["state_dtype"] = name->name;
  out["layer_kinds"] = describe_kinds(sizes, options.tokens.has_value());
  out["state_bytes_per_token"] = all.bytes_per_token;
  out["state_fixed_bytes"] = all.fixed_bytes;
  if (options.tokens) out["prefix"] = describe_prefix(parts, all, *options.tokens);
  return out;
}

}  // namespace longstraw::core::model
