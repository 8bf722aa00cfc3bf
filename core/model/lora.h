#pragma once
// Low-rank adapters: y = x Wᵀ + (lora_alpha / r) (x Aᵀ) Bᵀ beside the linear layers named by target_modules, W frozen
// (Hu et al. 2021, arXiv 2106.09685; names, layout and initialisation as in PEFT: A uniform in ±sqrt(1/in)·… (Kaiming, a = √5),
// B zero). Both trainers get them through Decoder: an adapter is two more linear operations of the execution.

#include "core/config/fields.h"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::model {

class Decoder;

struct LoraConfig {
  std::int64_t r = 0;
  double lora_alpha = 16.0;
  std::vector<std::string> target_modules{"all-linear"};
  double lora_dropout = 0.0;
  std::uint64_t seed = 0;
  std::optional<std::string> adapter;

  static constexpr auto fields() {
    using namespace config;
    using C = LoraConfig;
    return std::tuple{
        field("r", &C::r, "rank of the adapters; 0: all weights are trained", at_least(0)),
        field("lora_alpha", &C::lora_alpha, "adapters are scaled by lora_alpha / r", above(0)),
        field("target_modules", &C::target_modules,
              "names of linear layers (q_proj, ...), or all-linear: all but the output layer"),
        field("lora_dropout", &C::lora_dropout, "must be 0: a replay would need the same random mask as its capture", at_least(0)),
        field("seed", &C::seed, "of the initial A"),
        field("adapter", &C::adapter, "folder of an adapter to start from (adapter_config.json); null: a new one"),
    };
  }
  bool operator==(const LoraConfig&) const = default;
};

// Freezes the weights of `decoder` and puts adapters beside the targets: parameters() are then the adapters' A and B, in the
// order of the layers, named base_model.model.<module>.lora_A.weight [r, in] and .lora_B.weight [out, r], in the decoder's dtype.
// Throws ConfigError for a target that no linear layer has, one that can't have an adapter (experts, kv_b of latent
// attention: their products are not linear operations here), dropout, r = 0; FormatError for an adapter folder that does not fit.
void add_lora(Decoder& decoder, const LoraConfig& config);

// PEFT's folder: adapter_model.safetensors and adapter_config.json. Whole or not at all is the caller's business (a new folder).
void save_adapter(const Decoder& decoder, const std::string& base_model, const std::filesystem::path& folder);

// Adds the adapters into the weights and drops them; parameters() are all weights again.
void merge_lora(Decoder& decoder);

// While one lives, the decoder computes without its adapters: the frozen base as reference model.
class WithoutAdapters {
 public:
  explicit WithoutAdapters(const Decoder& decoder);
  ~WithoutAdapters();
  WithoutAdapters(const WithoutAdapters&) = delete;
  WithoutAdapters& operator=(const WithoutAdapters&) = delete;

 private:
  const Decoder& decoder_;
};

}  // namespace longstraw::core::model
