#include "core/model/lora.h"

#include "core/base/errors.h"
#include "core/base/sha256.h"
#include "core/model/adapters.h"
#include "core/model/lora_folder.h"
#include "core/model/registry.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace longstraw::core::model {

namespace {

constexpr std::string_view kAllLinear = "all-linear";
constexpr std::string_view kWeight = ".weight";

// A matrix of the layers, and whether it can have an adapter.
struct LinearLayer {
  std::shared_ptr<Parameter> weight;
  std::string module;           // by the names of Hugging Face's class
  std::string why_not;          // empty: it can
  std::string why_not_in_peft;  // empty: PEFT can load one
};

std::string module_name(const std::string& parameter, const CheckpointLayout& layout) {
  const std::string own = parameter.substr(0, parameter.size() - kWeight.size());
  for (const auto& [from, to] : layout.modules) {
    if (own.starts_with(from)) return to + own.substr(from.size());
  }
  return own;
}

std::string last_component(const std::string& module) { return module.substr(module.rfind('.') + 1); }

// Whether `module` is one that `target` names: as in PEFT, the whole of it or what comes after a dot.
bool is_named(const std::string& module, const std::string& target) { return module == target || module.ends_with("." + target); }

bool is_routed_expert(const std::string& module) { return module.find(".experts.") != std::string::npos; }

std::string why_no_adapter(const std::string& module) {
  if (is_routed_expert(module)) return "a routed expert: its products are no linear operation here";
  if (last_component(module) == "kv_b_proj")
    return "absorbed into queries and outputs of latent attention: no linear operation here";
  if (module.find(".indexer.") != std::string::npos) return "of a sparse indexer: no gradient of this objective reaches it";
  return {};
}

// As of PEFT 0.21 with transformers 5, which refuses the one by name, and makes the other's names those of fused experts.
std::string why_not_in_peft(const std::string& model_type, const std::string& module) {
  const std::string kind = last_component(module);
  const auto is_one_of = [](const std::string& text, std::initializer_list<const char*> of) {
    return std::find(of.begin(), of.end(), text) != of.end();
  };
  if (is_one_of(model_type, {"mamba2", "nemotron_h", "falcon_h1"}) && kind == "out_proj")
    return "PEFT has none there, because Mamba kernels take the weight itself";
  if (is_one_of(model_type, {"glm4_moe", "qwen3_next", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"}) &&
      is_one_of(kind, {"gate_proj", "up_proj", "down_proj"}))
    return "PEFT takes this name for the routed experts of such a model";
  return {};
}

// Neither the embedding and the output layer, which are outside the layers, nor convolutions, norms and routers.
std::vector<LinearLayer> linear_layers(const Decoder& decoder, const CheckpointLayout& layout) {
  std::vector<LinearLayer> linear;
  for (const auto& weight : decoder.weights()) {
    const std::string& name = weight->name;
    const bool matrix_of_layer = weight->shape.size() == 2 && name.ends_with(kWeight) && name.find(".layers.") != std::string::npos;
    if (!matrix_of_layer || name.ends_with(".gate.weight") || name.ends_with(".router.layer.weight")) continue;
    const std::string module = module_name(name, layout);
    LinearLayer layer{.weight = weight, .module = module, .why_not = why_no_adapter(module)};
    layer.why_not_in_peft = why_not_in_peft(decoder.architecture().model_type, module);
    linear.push_back(std::move(layer));
  }
  return linear;
}

// Last components of those that can have an adapter, each once, in alphabetical order.
std::vector<std::string> kinds_of(const std::vector<LinearLayer>& linear) {
  std::set<std::string> kinds;
  for (const LinearLayer& layer : linear) {
    if (layer.why_not.empty()) kinds.insert(last_component(layer.module));
  }
  return {kinds.begin(), kinds.end()};
}

CheckpointLayout layout_of(const Decoder& decoder) {
  const Family& family = family_of(decoder.architecture().model_type, "config.json");
  return family.layout != nullptr ? family.layout(decoder.architecture()) : CheckpointLayout{};
}

std::vector<LinearLayer> select(const std::vector<LinearLayer>& linear, const std::vector<std::string>& targets) {
  const bool all = std::find(targets.begin(), targets.end(), kAllLinear) != targets.end();
  std::set<std::string> found;
  std::vector<LinearLayer> selected;
  for (const LinearLayer& layer : linear) {
    bool wanted = all && layer.why_not.empty() && layer.why_not_in_peft.empty();
    for (const std::string& target : targets) {
      if (!is_named(layer.module, target)) continue;
      found.insert(target);
      // A name that experts share with other layers (gate_proj) means those.
      if (!is_routed_expert(layer.module) && !layer.why_not.empty())
        throw ConfigError(fmt::format("lora.target_modules: {}: {} is {}", target, layer.module, layer.why_not));
      wanted |= layer.why_not.empty();
    }
    if (wanted) selected.push_back(layer);
  }
  for (const std::string& target : targets) {
    if (target == kAllLinear) continue;
    const auto has = [&](const std::vector<LinearLayer>& layers) {
      return std::any_of(layers.begin(), layers.end(), [&](const auto& layer) { return is_named(layer.module, target); });
    };
    if (has(selected)) continue;
    if (has(linear))
      throw ConfigError(
          fmt::format("lora.target_modules: {}: only routed experts are called so, and they can't have adapters", target));
    throw ConfigError(fmt::format("lora.target_modules: {}: no linear layer is called so; wanted some of {}, or {}", target,
                                  fmt::join(kinds_of(linear), ", "), kAllLinear));
  }
  return selected;
}

bool has_all_linear(const LoraConfig& config) {
  return std::find(config.target_modules.begin(), config.target_modules.end(), kAllLinear) != config.target_modules.end();
}

std::vector<std::string> notes_on(const Decoder& decoder, const Adapters& adapters, const std::vector<LinearLayer>& linear,
                                  bool all_linear) {
  std::set<std::string> adapted, notes;
  for (const Adapter& adapter : adapters.all) adapted.insert(adapter.module);
  for (const LinearLayer& layer : linear) {
    const std::string kind = last_component(layer.module);
    if (is_routed_expert(layer.module)) continue;
    if (adapted.contains(layer.module) && !layer.why_not_in_peft.empty()) {
      notes.insert(fmt::format("lora: PEFT can't load this adapter, but merged weights: {}: {}", kind, layer.why_not_in_peft));
    } else if (all_linear && !adapted.contains(layer.module)) {
      notes.insert(
          fmt::format("lora: all-linear leaves out {}: {}", kind,
                      layer.why_not.empty() ? layer.why_not_in_peft + "; name it to have it all the same" : layer.why_not));
    }
  }
  if (all_linear && !decoder.routers().empty()) notes.insert("lora: all-linear leaves out routers and routed experts");
  return {notes.begin(), notes.end()};
}

uint64_t seed_of(uint64_t seed, const std::string& module) {
  Sha256 hash;
  hash.update(fmt::format("lora_A {} {}", seed, module));
  return std::stoull(hash.hex().substr(0, 16), nullptr, 16);
}

// torch.nn.init.kaiming_uniform_(A, a=√5): a bound of sqrt(6 / ((1 + 5) · in)). Drawn in float64 whatever the dtype.
at::Tensor initial_a(int64_t rank, int64_t inputs, uint64_t seed) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(inputs));
  return at::empty({rank, inputs}, at::kDouble).uniform_(-bound, bound, at::detail::createCPUGenerator(seed));
}

Adapter make_adapter(const LinearLayer& layer, int64_t rank, const at::Tensor& a_rI, const at::Tensor& b_Or) {
  const auto options = layer.weight->value.options().requires_grad(false);
  const auto parameter = [&](const char* part, const at::Tensor& value) {
    const std::string name = fmt::format("base_model.model.{}.{}.weight", layer.module, part);
    return std::make_shared<Parameter>(
        Parameter{.name = name, .shape = value.sizes().vec(), .value = value.to(options, false, true)});
  };
  return {layer.weight, layer.module, parameter("lora_A", a_rI), parameter("lora_B", b_Or)};
}

// Names that select the adapted modules and no others: their last components, or where these would select more, themselves.
std::vector<std::string> shortest_targets(const Adapters& adapters, const std::vector<LinearLayer>& linear) {
  std::set<std::string> kinds, modules;
  for (const Adapter& adapter : adapters.all) {
    kinds.insert(last_component(adapter.module));
    modules.insert(adapter.module);
  }
  const bool exact = std::all_of(linear.begin(), linear.end(), [&](const LinearLayer& layer) {
    return is_routed_expert(layer.module) || !kinds.contains(last_component(layer.module)) || modules.contains(layer.module);
  });
  if (exact) return {kinds.begin(), kinds.end()};
  return {modules.begin(), modules.end()};
}

std::unique_ptr<Adapters> new_adapters(const std::vector<LinearLayer>& linear, const LoraConfig& config) {
  auto adapters = std::make_unique<Adapters>();
  adapters->rank = config.r;
  adapters->alpha = config.lora_alpha;
  for (const LinearLayer& layer : select(linear, config.target_modules)) {
    const int64_t outputs = layer.weight->shape[0], inputs = layer.weight->shape[1];
    adapters->all.push_back(make_adapter(layer, config.r, initial_a(config.r, inputs, seed_of(config.seed, layer.module)),
                                         at::zeros({outputs, config.r}, at::kDouble)));
  }
  adapters->target_modules = has_all_linear(config) ? shortest_targets(*adapters, linear) : config.target_modules;
  return adapters;
}

std::unique_ptr<Adapters> adapters_of(const AdapterFolder& folder, const std::vector<LinearLayer>& linear) {
  auto adapters = std::make_unique<Adapters>();
  adapters->rank = folder.rank;
  adapters->alpha = folder.alpha;
  std::set<std::string> used;
  for (const LinearLayer& layer : linear) {
    const auto pair = folder.pairs.find(layer.module);
    if (pair == folder.pairs.end()) continue;
    if (!layer.why_not.empty())
      throw FormatError(fmt::format("{}: {}: can't have an adapter here: {}", folder.file, layer.module, layer.why_not));
    const Shape a{folder.rank, layer.weight->shape[1]}, b{layer.weight->shape[0], folder.rank};
    folder.check_shapes(layer.module, a, b);
    adapters->all.push_back(make_adapter(layer, folder.rank, pair->second.a_rI, pair->second.b_Or));
    used.insert(layer.module);
  }
  for (const auto& [module, pair] : folder.pairs) {
    if (!used.contains(module)) throw FormatError(fmt::format("{}: {}: the model has no such linear layer", folder.file, module));
  }
  adapters->target_modules = shortest_targets(*adapters, linear);
  return adapters;
}

}  // namespace

void add_lora(Decoder& decoder, const LoraConfig& config) {
  if (decoder.adapters() != nullptr) throw ConfigError("lora: the decoder has adapters already");
  if (config.lora_dropout != 0.0) {
    throw ConfigError(fmt::format("lora.lora_dropout: got {}, wanted 0: a replay would need the same random mask as its capture",
                                  config.lora_dropout));
  }
  const CheckpointLayout layout = layout_of(decoder);
  const auto linear = linear_layers(decoder, layout);
  if (config.adapter) {
    const AdapterFolder folder = read_adapter_folder(*config.adapter, layout);
    if (config.r != 0 && config.r != folder.rank)
      throw FormatError(fmt::format("{}: r: {}, but lora.r is {}", folder.config_file, folder.rank, config.r));
    set_adapters(decoder, adapters_of(folder, linear), folder.notes);
    return;
  }
  if (config.r <= 0) throw ConfigError(fmt::format("lora.r: got {}, wanted a rank > 0", config.r));
  auto adapters = new_adapters(linear, config);
  const auto notes = notes_on(decoder, *adapters, linear, has_all_linear(config));
  set_adapters(decoder, std::move(adapters), notes);
}

void read_adapter(Decoder& decoder, const std::filesystem::path& path) {
  const Adapters* adapters = decoder.adapters();
  if (adapters == nullptr)
    throw ConfigError(fmt::format("{}: an adapter, but the decoder has none to read it into", path.string()));
  const AdapterFolder folder = read_adapter_folder(path, layout_of(decoder));
  if (folder.rank != adapters->rank || folder.alpha != adapters->alpha) {
    throw FormatError(fmt::format("{}: r {} and lora_alpha {}, wanted {} and {}", folder.config_file, folder.rank, folder.alpha,
                                  adapters->rank, adapters->alpha));
  }
  for (const Adapter& adapter : adapters->all) {
    if (!folder.pairs.contains(adapter.module))
      throw FormatError(fmt::format("{}: {}: has no adapter there, wanted one", folder.file, adapter.module));
    folder.check_shapes(adapter.module, adapter.a_rI->shape, adapter.b_Or->shape);
  }
  if (folder.pairs.size() != adapters->all.size()) {
    throw FormatError(fmt::format("{}: adapters of {} linear layers, wanted those of {}", folder.file, folder.pairs.size(),
                                  adapters->all.size()));
  }
  const at::NoGradGuard no_grad;
  for (const Adapter& adapter : adapters->all) {
    const auto& pair = folder.pairs.at(adapter.module);
    adapter.a_rI->value.copy_(pair.a_rI);
    adapter.b_Or->value.copy_(pair.b_Or);
  }
}

void merge_lora(Decoder& decoder) {
  const Adapters* adapters = decoder.adapters();
  if (adapters == nullptr) throw ConfigError("lora: the decoder has no adapters to merge");
  {
    const at::NoGradGuard no_grad;
    for (const Adapter& adapter : adapters->all) adapter.weight->value.copy_(merged_value(decoder, *adapter.weight));
  }
  set_adapters(decoder, nullptr);
}

WithoutAdapters::WithoutAdapters(const Decoder& decoder) : decoder_(decoder) {
  if (decoder_.adapters() != nullptr) ++decoder_.adapters()->left_out;
}

WithoutAdapters::~WithoutAdapters() {
  if (decoder_.adapters() != nullptr) --decoder_.adapters()->left_out;
}

}  // namespace longstraw::core::model
