#pragma once
// Rotary position embedding (RoFormer, arXiv 2104.09864) and its scalings, as Hugging Face transformers computes them
// (modeling_rope_utils): inverse frequencies f_i, i < d/2; token at position p is rotated by the angle p · f_i.
//
//   default   f_i = theta^(-2i/d)
//   linear    f_i / factor
//   llama3    long waves divided by factor, short ones kept, a ramp in between
//   yarn      the same idea over the index i (arXiv 2309.00071); cos and sin times the attention factor
//   dynamic   theta grows with the sequence's length beyond max_positions (NTK)
//   longrope  f_i / short_factor_i, or / long_factor_i for a sequence longer than original_max_positions
//
// Frequencies and angles are computed in float32 for float32 and bfloat16 models, exactly as Hugging Face does, and in
// float64 for float64 models.

#include "core/model/execution.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::model {

class JsonReader;

// Shortest and longest whole sequence (prompt and response) of a batch. Some rotary scalings (dynamic, longrope)
// change their frequencies with the length of the sequence: a batch whose lengths disagree about them is refused.
struct SequenceLengths {
  int64_t shortest = 0;
  int64_t longest = 0;
};

enum class RotaryType { kDefault, kLinear, kLlama3, kYarn, kDynamic, kLongrope };

struct Rotary {
  RotaryType type = RotaryType::kDefault;
  int64_t dims = 0;  // rotated dimensions of a head; even
  double theta = 10000.0;
  int64_t max_positions = 0;           // the model's longest sequence
  int64_t original_max_positions = 0;  // that of its first training
  double factor = 1.0;
  std::optional<double> attention_factor;  // yarn, longrope: stated, instead of derived from factor
  double low_freq_factor = 1.0;            // llama3
  double high_freq_factor = 4.0;
  double beta_fast = 32.0;  // yarn
  double beta_slow = 1.0;
  double mscale = 0.0;  // 0: absent
  double mscale_all_dim = 0.0;
  bool truncate = true;
  std::vector<double> short_factor;  // longrope
  std::vector<double> long_factor;
};

// From config.json: `rope_scaling` or `rope_parameters` (rope_type, or its older name type), then the top-level keys
// rope_theta, partial_rotary_factor and original_max_position_embeddings. Throws FormatError naming file and key.
struct RotaryDefaults {
  int64_t max_positions = 2048;
  double theta = 10000.0;
  // Share of a head's dimensions that is rotated when partial_rotary_factor is missing; none: the family has no such key,
  // and one that asks for another share than all is refused.
  std::optional<double> partial = {};
};
Rotary read_rotary(const JsonReader& config, int64_t head_dim, const RotaryDefaults& defaults);

std::string name_of(RotaryType type);

struct RotaryFrequencies {
  at::Tensor inverse_f;  // f = dims / 2; float32, or float64 for a float64 model
  double attention_factor = 1.0;
};

// Throws ConfigError when the lengths of one batch ask for different frequencies: keys of a shared prompt would depend
// on the response that follows it.
RotaryFrequencies rotary_frequencies(const Rotary& rotary, SequenceLengths lengths, at::ScalarType model_dtype);

RotaryTable rotary_table(const RotaryFrequencies& frequencies, const at::Tensor& positions_S, at::ScalarType model_dtype);

}  // namespace longstraw::core::model
