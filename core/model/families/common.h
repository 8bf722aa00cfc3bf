#pragma once
// What the families' readers of config.json have in common. Defaults are those of the family's configuration class in
// Hugging Face transformers. Everything refused here is a FormatError naming file, key, got and wanted.

#include "core/model/architecture.h"
#include "core/model/block.h"
#include "core/model/blocks/experts.h"
#include "core/model/json_reader.h"

#include <memory>
#include <optional>
#include <string>

namespace longstraw::core::model {

// Features that change the computation and that no family carries out: another activation than silu, dropout.
void refuse_unsupported(const JsonReader& config);

struct SizeDefaults {
  std::optional<int64_t> kv_heads = {};      // none: as many as heads
  std::optional<int64_t> head_dim = {};      // none: hidden / heads
  std::optional<int64_t> intermediate = {};  // none: intermediate_size must be there; 0: the family has no such key
  double norm_eps = 1e-6;
  bool tied_embeddings = false;
  RotaryDefaults rotary = {};
};

// Sizes, norm, tied embeddings, rotary embedding; full attention everywhere. Calls refuse_unsupported.
Architecture read_sizes(const JsonReader& config, const SizeDefaults& defaults);

// The router of DeepSeek-V3 and its like: sigmoid scores, correction bias, groups (n_group, topk_group, norm_topk_prob,
// routed_scaling_factor, whose defaults come in `defaults`). Refuses groups that don't divide the experts evenly, have fewer
// than the two whose scores rank a group, or hold fewer experts than are chosen.
Routing read_grouped_routing(const JsonReader& config, int64_t experts, int64_t chosen, Routing defaults);

// Refuses more chosen experts than there are.
void check_chosen(const JsonReader& config, std::string_view key, int64_t chosen, int64_t experts);

// A residual connection around one block with its norm's weight [D], named `norm`. The block is made after the norm, so
// that parameters are declared in the order of the computation.
template <class MakeBlock>
Residual residual_around(Builder& builder, const std::string& norm, const Architecture& a, bool zero_centred, MakeBlock make) {
  Residual residual;
  residual.norm = {builder.parameter(norm, {a.hidden}), a.norm_eps, zero_centred};
  residual.blocks.push_back(make());
  return residual;
}

}  // namespace longstraw::core::model
