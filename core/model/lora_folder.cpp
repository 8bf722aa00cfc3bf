#include "core/model/lora_folder.h"

#include "core/base/atomic_file.h"
#include "core/base/errors.h"
#include "core/model/adapters.h"
#include "core/model/checkpoint.h"
#include "core/model/json_reader.h"
#include "core/model/lora.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cmath>
#include <optional>
#include <string_view>

namespace longstraw::core::model {

namespace {

constexpr const char* kConfigFile = "adapter_config.json";
constexpr const char* kTensorFile = "adapter_model.safetensors";
constexpr std::string_view kBefore = "base_model.model.";
constexpr std::string_view kA = ".lora_A.weight", kB = ".lora_B.weight";

// Keys of adapter_config.json by which an adapter is, or computes, something else.
constexpr std::array kOtherKinds{"use_dora",
                                 "use_rslora",
                                 "use_qalora",
                                 "lora_bias",
                                 "use_bdlora",
                                 "rank_pattern",
                                 "alpha_pattern",
                                 "modules_to_save",
                                 "layer_replication",
                                 "target_parameters",
                                 "trainable_token_indices",
                                 "alora_invocation_tokens",
                                 "arrow_config",
                                 "kasa_config",
                                 "velora_config",
                                 "monteclora_config"};

bool is_set(const nlohmann::json& value) {
  if (value.is_null()) return false;
  if (value.is_boolean()) return value.get<bool>();
  return !value.empty();
}

void read_config(AdapterFolder& folder) {
  const JsonReader config = read_json(folder.config_file);
  if (config.text("peft_type") != "LORA") config.unsupported("peft_type", "only LORA is supported");
  folder.rank = config.positive("r");
  folder.alpha = config.positive_number("lora_alpha");
  if (config.text("bias", "none") != "none") config.unsupported("bias", "only none is supported");
  for (const char* key : kOtherKinds) {
    if (config.is_present(key) && is_set(config.json()[key])) config.unsupported(key, "only plain adapters are supported");
  }
  if (const double dropout = config.number("lora_dropout", 0.0); dropout != 0.0) {
    folder.notes.push_back(
        fmt::format("lora: {} was trained with a lora_dropout of {}; here there is none", folder.config_file, dropout));
  }
}

std::string decoders_module(std::string module, const CheckpointLayout& layout) {
  const auto replace_first = [&](const std::vector<CheckpointLayout::Prefix>& prefixes) {
    for (const auto& [from, to] : prefixes) {
      if (module.starts_with(from)) {
        module = to + module.substr(from.size());
        return;
      }
    }
  };
  replace_first(layout.prefixes);
  replace_first(layout.modules);
  return module;
}

void read_tensors(AdapterFolder& folder, const CheckpointLayout& layout) {
  const SafetensorsFile file(folder.file);
  for (const StoredTensor& tensor : file.tensors()) {
    const std::string& name = tensor.name;
    const bool is_a = name.ends_with(kA), is_b = name.ends_with(kB);
    if (!name.starts_with(kBefore) || (!is_a && !is_b)) {
      throw FormatError(fmt::format("{}: tensor {}: wanted {}<module>{} and {}", folder.file, name, kBefore, kA, kB));
    }
    if (!is_floating(tensor.dtype) || tensor.dtype == StoredDtype::kF8E4m3 || tensor.shape.size() != 2) {
      throw FormatError(fmt::format("{}: tensor {}: {} of shape {}, wanted a matrix of floats", folder.file, name,
                                    name_of(tensor.dtype), to_string(tensor.shape)));
    }
    const std::string stored = name.substr(kBefore.size(), name.size() - kBefore.size() - (is_a ? kA : kB).size());
    AdapterFolder::Pair& pair = folder.pairs[decoders_module(stored, layout)];
    at::Tensor& part = is_a ? pair.a_rI : pair.b_Or;
    if (part.defined()) throw FormatError(fmt::format("{}: tensor {}: of a module that has one already", folder.file, name));
    part = read_tensor(file, tensor);
  }
  if (folder.pairs.empty()) throw FormatError(fmt::format("{}: holds no adapter", folder.file));
  for (const auto& [module, pair] : folder.pairs) {
    if (!pair.a_rI.defined() || !pair.b_Or.defined())
      throw FormatError(
          fmt::format("{}: {}: has {} alone, wanted both", folder.file, module, pair.a_rI.defined() ? "lora_A" : "lora_B"));
  }
}

}  // namespace

void AdapterFolder::check_shapes(const std::string& module, const Shape& a, const Shape& b) const {
  const Pair& pair = pairs.at(module);
  const auto check = [&](std::string_view part, const at::Tensor& got, const Shape& wanted) {
    if (got.sizes() == at::IntArrayRef(wanted)) return;
    throw FormatError(fmt::format("{}: tensor {}{}{}: shape {}, wanted {}", file, kBefore, module, part,
                                  to_string(got.sizes().vec()), to_string(wanted)));
  };
  check(kA, pair.a_rI, a);
  check(kB, pair.b_Or, b);
}

AdapterFolder read_adapter_folder(const std::filesystem::path& path, const CheckpointLayout& layout) {
  AdapterFolder folder{.file = (path / kTensorFile).string(), .config_file = (path / kConfigFile).string()};
  read_config(folder);
  read_tensors(folder, layout);
  return folder;
}

void save_adapter(const Decoder& decoder, const std::string& base_model, const std::filesystem::path& folder) {
  const Adapters* adapters = decoder.adapters();
  if (adapters == nullptr) throw ConfigError("lora: the decoder has no adapters to save");
  std::vector<at::Tensor> values;  // keeps the bytes alive
  std::vector<StoredTensor> tensors;
  for (const auto& parameter : decoder.parameters()) {
    values.push_back(parameter->value.detach().to(at::kCPU).contiguous());
    tensors.push_back({.name = parameter->name,
                       .dtype = stored_dtype(decoder.dtype()),
                       .shape = parameter->shape,
                       .bytes = {static_cast<const std::byte*>(values.back().const_data_ptr()), values.back().nbytes()}});
  }
  write_safetensors(folder / kTensorFile, tensors, {{"format", "pt"}});
  // A whole number as one: some readers take nothing else.
  const bool whole = std::floor(adapters->alpha) == adapters->alpha && std::abs(adapters->alpha) < 1e9;
  nlohmann::ordered_json alpha = adapters->alpha;
  if (whole) alpha = static_cast<int64_t>(adapters->alpha);
  const nlohmann::ordered_json config{{"peft_type", "LORA"},
                                      {"task_type", "CAUSAL_LM"},
                                      {"base_model_name_or_path", base_model},
                                      {"r", adapters->rank},
                                      {"lora_alpha", alpha},
                                      {"lora_dropout", 0.0},
                                      {"target_modules", adapters->target_modules},
                                      {"bias", "none"},
                                      {"fan_in_fan_out", false},
                                      {"init_lora_weights", true},
                                      {"inference_mode", true}};
  AtomicFile file(folder / kConfigFile);
  file.write(config.dump(2) + "\n");
  file.commit();
}

}  // namespace longstraw::core::model
