#pragma once
// The parameters of the part of a layer that reads the prompt's state, found by name and by shape, for every family.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "compare/deviations.h"
#include "compare/rows.h"

namespace longstraw::compare {

using Parameters = std::vector<const ParameterMeasure*>;

// Of one layer, in order of name.
Parameters parameters_of_layer(const StepMeasure& measure, std::int64_t layer);

// The gated delta rule or a Mamba-2 mixer, known by its `A_log`.
struct RecurrentMixer {
  std::int64_t layer = 0;
  std::string prefix;  // "linear_attn.", "mixer.", "mamba."
  Parameters convolution;
  Parameters decay;    // A_log, dt_bias
  Parameters input;    // projections that feed the state
  Parameters readers;  // what only acts on what is read from the state: gate, norm, D, output projection
  // Rows of `window_input` that only read the state (queries of the delta rule, C of Mamba-2): prompt tokens reach later ones
  // through them by the convolution's window alone. One entry for each layout that the shapes allow; none: not known.
  const ParameterMeasure* window_input = nullptr;
  std::vector<std::vector<RowRange>> window_readers;
};
std::optional<RecurrentMixer> recurrent_mixer(const StepMeasure& measure, std::int64_t layer);

// Multi-head latent attention, known by its kv_b_proj.
struct LatentMixer {
  std::int64_t layer = 0;
  const ParameterMeasure* down = nullptr;  // kv_a_proj_with_mqa: rows of the latent, then of the rotary key
  const ParameterMeasure* norm = nullptr;  // of the latent
  const ParameterMeasure* expansion = nullptr;
  std::int64_t latent_rows = 0;
};
std::optional<LatentMixer> latent_mixer(const StepMeasure& measure, std::int64_t layer);

// Attention with one projection for keys and one for values.
struct AttentionMixer {
  std::int64_t layer = 0;
  const ParameterMeasure* key = nullptr;
  const ParameterMeasure* value = nullptr;
};
std::optional<AttentionMixer> attention_mixer(const StepMeasure& measure, std::int64_t layer);

}  // namespace longstraw::compare
