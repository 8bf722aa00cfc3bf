#pragma once
// Low-rank adapters: y = x Wᵀ + (lora_alpha / r) (x Aᵀ) Bᵀ beside the linear layers named by target_modules, W frozen
// (Hu et al. 2021, arXiv 2106.09685; names, layout and initialisation as in PEFT: A uniform in ±sqrt(1/in) (Kaiming, a = √5),
// B zero). Both trainers get them through Decoder: an adapter is two more linear operations of the execution.
//
// Linear layers are the matrices of the layers that Hugging Face's class has as nn.Linear, by its names: attention (q_proj,
// q_a_proj, kv_a_proj_with_mqa, o_proj, …), gated delta rule and Mamba-2 (in_proj…, out_proj), MLPs and shared experts (gate_proj,
// up_proj, down_proj, shared_expert_gate, fc1_latent_proj, …). Not among them: routers, which are no nn.Linear there; and those
// that can't have an adapter here: routed experts and the kv_b_proj of latent attention, whose products are not linear operations,
// and a sparse indexer, which no gradient reaches.

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
        field("r", &C::r, "rank of the adapters; 0: no adapters (without lora.adapter), all weights are trained", at_least(0)),
        field("lora_alpha", &C::lora_alpha, "adapters are scaled by lora_alpha / r", above(0)),
        field("target_modules", &C::target_modules,
              "names of linear layers (q_proj, ...), or all-linear: those of the layers whose adapters PEFT can load"),
        field("lora_dropout", &C::lora_dropout, "must be 0: a replay would need the same random mask as its capture", at_least(0)),
        field("seed", &C::seed, "of the initial A"),
        field("adapter", &C::adapter,
              "folder of an adapter to start from (adapter_config.json), with its r, lora_alpha and modules; null: a new one"),
    };
  }
  bool wanted() const { return r > 0 || adapter; }
  bool operator==(const LoraConfig&) const = default;
};

// Freezes the weights of `decoder` and puts adapters beside the targets: parameters() are then the adapters' A and B, in the
// order of the layers, named base_model.model.<module>.lora_A.weight [r, in] and .lora_B.weight [out, r], in the decoder's dtype.
// A target is the last component of a module's name, several last ones, or the whole name, as in PEFT. A depends on seed and
// name alone. With config.adapter the folder says which modules have adapters, their rank and lora_alpha; config.r must then be 0
// or the same. What all-linear leaves out is in the decoder's notes.
// Throws ConfigError for a target that no linear layer has, one that can't have an adapter, dropout, r = 0, a decoder that has
// adapters; FormatError for an adapter folder that does not fit, or that holds more than plain adapters (DoRA, rank patterns, …).
void add_lora(Decoder& decoder, const LoraConfig& config);

// PEFT's folder: adapter_model.safetensors and adapter_config.json. Whole or not at all is the caller's business (a new folder).
void save_adapter(const Decoder& decoder, const std::string& base_model, const std::filesystem::path& folder);

// What save_adapter wrote, back into the decoder's adapters, bit for bit. FormatError when it is of other modules or another rank.
void read_adapter(Decoder& decoder, const std::filesystem::path& folder);

// Adds the adapters into the weights, W + (lora_alpha / r) B A in float32 or wider, and drops them; parameters() are all weights
// again.
void merge_lora(Decoder& decoder);

// While one lives, the decoder computes without its adapters: the frozen base as reference model. They may be nested.
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
