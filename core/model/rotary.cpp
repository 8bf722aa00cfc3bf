#include "core/model/rotary.h"

#include "core/base/errors.h"
#include "core/model/json_reader.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

namespace longstraw::core::model {

namespace {

struct TypeName {
  RotaryType type;
  const char* name;
};
constexpr std::array kTypes{TypeName{RotaryType::kDefault, "default"}, TypeName{RotaryType::kLinear, "linear"},
                            TypeName{RotaryType::kLlama3, "llama3"},   TypeName{RotaryType::kYarn, "yarn"},
                            TypeName{RotaryType::kDynamic, "dynamic"}, TypeName{RotaryType::kLongrope, "longrope"}};

RotaryType read_type(const JsonReader& section) {
  const std::string_view key = section.has("rope_type") ? "rope_type" : "type";
  const std::string name = section.text(key, "default");
  for (const auto& [type, known] : kTypes) {
    if (name == known) return type;
  }
  section.refuse(key, "default, linear, llama3, yarn, dynamic or longrope");
}

at::ScalarType angle_dtype(at::ScalarType model_dtype) { return model_dtype == at::kDouble ? at::kDouble : at::kFloat; }

// 2i / d for i < d / 2
at::Tensor exponents(const Rotary& rotary, at::ScalarType dtype) {
  return at::arange(0, rotary.dims, 2, at::kLong).to(dtype) / rotary.dims;
}

at::Tensor plain(const Rotary& rotary, at::ScalarType dtype) {
  return at::reciprocal(at::pow(rotary.theta, exponents(rotary, dtype)));
}

at::Tensor llama3(const Rotary& rotary, at::ScalarType dtype) {
  const at::Tensor f = plain(rotary, dtype);
  const double original = double(rotary.original_max_positions);
  const at::Tensor wavelength = 2 * std::numbers::pi / f;
  const at::Tensor is_long = wavelength > original / rotary.low_freq_factor;
  const at::Tensor is_short = wavelength < original / rotary.high_freq_factor;
  const at::Tensor scaled = at::where(is_long, f / rotary.factor, f);
  const at::Tensor smooth = (original / wavelength - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor);
  const at::Tensor between = (1 - smooth) * scaled / rotary.factor + smooth * scaled;
  return at::where(is_long | is_short, scaled, between);
}

// The index i at which a wave turns `turns` times within the original context.
double correction_index(const Rotary& rotary, double turns) {
  return double(rotary.dims) * std::log(double(rotary.original_max_positions) / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(rotary.theta));
}

at::Tensor yarn(const Rotary& rotary, at::ScalarType dtype) {
  double low = correction_index(rotary, rotary.beta_fast);
  double high = correction_index(rotary, rotary.beta_slow);
  if (rotary.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, double(rotary.dims - 1));
  if (low == high) high += 0.001;  // as Hugging Face avoids the division by zero

  const at::Tensor ramp = ((at::arange(rotary.dims / 2, dtype) - low) / (high - low)).clamp(0, 1);
  const at::Tensor extrapolated_share = 1 - ramp;
  const at::Tensor waves = at::pow(rotary.theta, exponents(rotary, dtype));
  const at::Tensor extrapolated = at::reciprocal(waves);
  const at::Tensor interpolated = at::reciprocal(rotary.factor * waves);
  return interpolated * (1 - extrapolated_share) + extrapolated * extrapolated_share;
}

double yarn_attention_factor(const Rotary& rotary) {
  if (rotary.attention_factor) return *rotary.attention_factor;
  const auto magnitude = [&](double mscale) { return rotary.factor <= 1 ? 1.0 : 0.1 * mscale * std::log(rotary.factor) + 1.0; };
  if (rotary.mscale != 0 && rotary.mscale_all_dim != 0) return magnitude(rotary.mscale) / magnitude(rotary.mscale_all_dim);
  return magnitude(1.0);
}

at::Tensor dynamic_ntk(const Rotary& rotary, int64_t length, at::ScalarType dtype) {
  if (length <= rotary.max_positions) return plain(rotary, dtype);
  // Hugging Face holds the length in a tensor here, so theta itself is rounded to the dtype of the angles.
  const at::Tensor stretched =
      at::scalar_tensor(length, dtype) * rotary.factor / double(rotary.max_positions) - (rotary.factor - 1);
  const at::Tensor theta = rotary.theta * at::pow(stretched, double(rotary.dims) / double(rotary.dims - 2));
  return at::reciprocal(at::pow(theta, exponents(rotary, dtype)));
}

at::Tensor longrope(const Rotary& rotary, int64_t length, at::ScalarType dtype) {
  const auto& factors = length > rotary.original_max_positions ? rotary.long_factor : rotary.short_factor;
  const at::Tensor divisors = at::tensor(at::ArrayRef<double>(factors), at::kDouble).to(dtype);
  return at::reciprocal(divisors * at::pow(rotary.theta, exponents(rotary, dtype)));
}

double longrope_attention_factor(const Rotary& rotary) {
  if (rotary.attention_factor) return *rotary.attention_factor;
  if (rotary.factor <= 1) return 1.0;
  return std::sqrt(1 + std::log(rotary.factor) / std::log(double(rotary.original_max_positions)));
}

void refuse_mixed_lengths(const Rotary& rotary, SequenceLengths lengths) {
  const int64_t border = rotary.type == RotaryType::kDynamic ? rotary.max_positions : rotary.original_max_positions;
  const bool differ = rotary.type == RotaryType::kDynamic ? lengths.longest > border && lengths.shortest != lengths.longest
                                                          : lengths.longest > border && lengths.shortest <= border;
  if (!differ) return;
  throw ConfigError(fmt::format(
      "rotary scaling {}: sequences of {} and {} tokens in one batch have different frequencies (they change beyond {}), "
      "so they can't share a prompt; use batches whose sequences {}",
      name_of(rotary.type), lengths.shortest, lengths.longest, border,
      rotary.type == RotaryType::kDynamic ? "are equally long or all within that" : "are all within that or all beyond it"));
}

int64_t rotated_dims(const JsonReader& section, const JsonReader& config, int64_t head_dim, const std::optional<double>& partial) {
  const JsonReader& reader = section.has("partial_rotary_factor") ? section : config;
  const double share = reader.number("partial_rotary_factor", partial.value_or(1.0));
  if (!partial && share != 1.0) reader.refuse("partial_rotary_factor", "1 for this family");
  const auto dims = static_cast<int64_t>(double(head_dim) * share);  // as Hugging Face rounds it: down
  if (!(share > 0.0) || dims > head_dim || dims < 2 || dims % 2 != 0) {
    const bool is_whole = share == 1.0;
    (is_whole ? config : reader)
        .refuse(is_whole ? "head_dim" : "partial_rotary_factor",
                fmt::format("an even number of rotated dimensions of {}: the rotation pairs them", head_dim));
  }
  return dims;
}

}  // namespace

std::string name_of(RotaryType type) {
  for (const auto& [known, name] : kTypes) {
    if (known == type) return name;
  }
  return "?";
}

Rotary read_rotary(const JsonReader& config, int64_t head_dim, const RotaryDefaults& defaults) {
  const auto is_filled = [&](std::string_view key) { return config.has(key) && !config.section(key).json().empty(); };
  const std::string_view key = is_filled("rope_scaling") ? "rope_scaling" : "rope_parameters";
  const JsonReader section = is_filled(key) ? config.section(key) : JsonReader(config.file(), nlohmann::json::object());
  for (const auto& [name, value] : section.json().items()) {
    if (value.is_object()) section.unsupported(name, "rotary parameters by layer type are not supported");
  }

  Rotary rotary;
  rotary.type = read_type(section);
  rotary.dims = rotated_dims(section, config, head_dim, defaults.partial);
  rotary.theta =
      section.has("rope_theta") ? section.positive_number("rope_theta") : config.positive_number("rope_theta", defaults.theta);
  rotary.max_positions = config.positive("max_position_embeddings", defaults.max_positions);
  rotary.original_max_positions = config.has("original_max_position_embeddings")
                                      ? config.positive("original_max_position_embeddings")
                                      : section.positive("original_max_position_embeddings", rotary.max_positions);

  const double implied_factor = double(rotary.max_positions) / double(rotary.original_max_positions);
  switch (rotary.type) {
    case RotaryType::kDefault: break;
    case RotaryType::kLinear: rotary.factor = section.positive_number("factor"); break;
    case RotaryType::kDynamic:
      rotary.factor = section.positive_number("factor");
      if (rotary.dims <= 2) config.refuse("head_dim", "more than 2 for the dynamic rotary scaling");
      break;
    case RotaryType::kLlama3:
      rotary.factor = section.positive_number("factor");
      rotary.low_freq_factor = section.positive_number("low_freq_factor");
      rotary.high_freq_factor = section.positive_number("high_freq_factor");
      if (rotary.high_freq_factor <= rotary.low_freq_factor) section.refuse("high_freq_factor", "more than low_freq_factor");
      break;
    case RotaryType::kYarn:
      rotary.factor = section.positive_number("factor", implied_factor);
      rotary.beta_fast = section.number("beta_fast", 32) == 0 ? 32 : section.positive_number("beta_fast", 32);
      rotary.beta_slow = section.number("beta_slow", 1) == 0 ? 1 : section.positive_number("beta_slow", 1);
      rotary.mscale = section.number("mscale", 0);
      rotary.mscale_all_dim = section.number("mscale_all_dim", 0);
      rotary.truncate = section.flag("truncate", true);
      if (section.has("attention_factor")) rotary.attention_factor = section.positive_number("attention_factor");
      if (rotary.theta == 1.0) section.refuse("rope_theta", "a number other than 1");
      break;
    case RotaryType::kLongrope:
      rotary.factor = section.positive_number("factor", implied_factor);
      rotary.short_factor = section.positive_numbers("short_factor");
      rotary.long_factor = section.positive_numbers("long_factor");
      if (section.has("attention_factor")) rotary.attention_factor = section.positive_number("attention_factor");
      for (const char* list : {"short_factor", "long_factor"}) {
        if (section.positive_numbers(list).size() != size_t(rotary.dims / 2)) {
          section.refuse(list, fmt::format("{} numbers: one for each frequency", rotary.dims / 2));
        }
      }
      break;
  }
  return rotary;
}

RotaryFrequencies rotary_frequencies(const Rotary& rotary, SequenceLengths lengths, at::ScalarType model_dtype) {
  const at::ScalarType dtype = angle_dtype(model_dtype);
  switch (rotary.type) {
    case RotaryType::kDefault: return {plain(rotary, dtype), 1.0};
    case RotaryType::kLinear: return {plain(rotary, dtype) / rotary.factor, 1.0};
    case RotaryType::kLlama3: return {llama3(rotary, dtype), 1.0};
    case RotaryType::kYarn: return {yarn(rotary, dtype), yarn_attention_factor(rotary)};
    case RotaryType::kDynamic: refuse_mixed_lengths(rotary, lengths); return {dynamic_ntk(rotary, lengths.longest, dtype), 1.0};
    case RotaryType::kLongrope:
      refuse_mixed_lengths(rotary, lengths);
      return {longrope(rotary, lengths.longest, dtype), longrope_attention_factor(rotary)};
  }
  throw ConfigError("rotary scaling: unknown");
}

RotaryTable rotary_table(const RotaryFrequencies& frequencies, const at::Tensor& positions_S, at::ScalarType model_dtype) {
  const at::Tensor inverse_f = frequencies.inverse_f.to(positions_S.device());
  const at::Tensor angles_Sf = positions_S.to(inverse_f.scalar_type()).unsqueeze(1) * inverse_f;
  const at::Tensor angles_Sr = at::cat({angles_Sf, angles_Sf}, 1);
  return {(at::cos(angles_Sr) * frequencies.attention_factor).to(model_dtype),
          (at::sin(angles_Sr) * frequencies.attention_factor).to(model_dtype)};
}

}  // namespace longstraw::core::model
