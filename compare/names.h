#pragma once
// What a parameter's name tells, for every family whose layers are called `model.layers.N.` or `backbone.layers.N.`
// (also behind a prefix, as in `model.language_model.layers.N.`).

#include <cstdint>
#include <optional>
#include <string>

namespace longstraw::compare {

// 12 for "model.layers.12.self_attn.q_proj.weight"; nothing for "model.norm.weight".
std::optional<std::int64_t> layer_of(const std::string& name);

// The name without its layer and expert numbers: "self_attn.q_proj.weight", "mlp.experts.gate_proj.weight"; the whole name
// outside the layers.
std::string kind_of(const std::string& name);

// 11 for "model.layers.3.mlp.experts.11.gate_proj.weight"; nothing outside the experts, or where they are one tensor.
std::optional<std::int64_t> expert_of(const std::string& name);

// What takes part in making the state that later tokens read: keys, values, latents, recurrent and convolution inputs, and
// the norm before them. The other parameters of the last layer act on response tokens only, as far as the loss can tell.
bool makes_state(const std::string& kind);

// The router and the experts it chooses among: what only some tokens pass. Shared experts are not.
bool is_routed(const std::string& kind);

// The indexer of sparse attention. Its choice is a constant: no gradient of this loss reaches it.
bool is_indexer(const std::string& kind);

}  // namespace longstraw::compare
