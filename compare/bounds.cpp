#include "compare/bounds.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/errors.h"

namespace longstraw::compare {
namespace {

constexpr double kFloat64Whole = 1e-12, kFloat64Parameter = 1e-10;
constexpr double kFloat32Whole = 1e-5, kFloat32Parameter = 1e-3;
constexpr double kFloat32ParameterNoise = 10;
constexpr double kBfloat16Whole = 16.0 / 256.0;  // 16 units of rounding
constexpr double kBfloat16Parameter = 0.1, kBfloat16ParameterNoise = 3;

Bound larger(Bound a, Bound b) { return a.value >= b.value ? a : b; }

}  // namespace

Dtype dtype_of(const core::record::RecordReader& record) {
  const std::string& name = record.header().dtype;
  if (name == "float64") return Dtype::kFloat64;
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBfloat16;
  throw FormatError(fmt::format("record {}: dtype {}, expected float64, float32 or bfloat16", record.path(), name));
}

Dtype coarser(Dtype a, Dtype b) { return std::max(a, b); }

const char* name_of_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64: return "float64";
    case Dtype::kFloat32: return "float32";
    case Dtype::kBfloat16: return "bfloat16";
  }
  return "?";
}

Bounds::Bounds(Dtype dtype, const CompareConfig& config, const NoiseMeasure* noise)
    : dtype_(dtype), config_(config), noise_(noise) {
  if (config.whole_bound) {
    whole_ = Bound{*config.whole_bound, "set by compare.whole_bound"};
    return;
  }
  const double floor = noise == nullptr ? 0 : noise->reference.whole.relative_l2();
  switch (dtype) {
    case Dtype::kFloat64: whole_ = Bound{kFloat64Whole, "float64: rounding accumulates to far less than 1e-12"}; break;
    case Dtype::kFloat32:
      whole_ = Bound{kFloat32Whole, "float32: rounding of 6e-8 accumulates to less than 1e-5"};
      if (noise != nullptr) {
        // Two float32 computations can't be asked to be nearer to each other than one of them is to the truth.
        whole_ =
            larger(*whole_, {floor, fmt::format("float32: the reference's own distance from the noise record, {:.3e}", floor)});
        noise_floor_ =
            Bound{config.noise_factor * floor, fmt::format("{} x the noise floor {:.3e} (reference in float32 against {})",
                                                           config.noise_factor, floor, "the noise record")};
      }
      break;
    case Dtype::kBfloat16:
      if (noise == nullptr) {
        whole_ = Bound{kBfloat16Whole, "bfloat16 without a noise record: 16 units of rounding (2^-8), a coarse bound"};
      } else {
        wide_ = Bound{config.bfloat16_factor * floor,
                      fmt::format("{} x the reference's own bfloat16 error {:.3e}", config.bfloat16_factor, floor)};
      }
      break;
  }
}

Bound Bounds::parameter(const std::string& name) const {
  if (config_.parameter_bound) return {*config_.parameter_bound, "set by compare.parameter_bound"};
  const ParameterMeasure* own = noise_ == nullptr ? nullptr : noise_->reference.find(name);
  const double floor = own == nullptr ? 0 : own->statistics.relative_l2();
  const double whole_floor = noise_ == nullptr ? 0 : noise_->reference.whole.relative_l2();
  switch (dtype_) {
    case Dtype::kFloat64: return {kFloat64Parameter, "float64: 100 x the whole's bound, for sums that cancel"};
    case Dtype::kFloat32:
      return larger({kFloat32Parameter, "float32: 100 x the whole's bound, for sums that cancel"},
                    {kFloat32ParameterNoise * floor, "float32: 10 x the parameter's own noise floor"});
    case Dtype::kBfloat16:
      // One parameter's own floor is a single draw, and may be a lucky one: the whole's floor counts as well.
      return larger({kBfloat16Parameter, "bfloat16: 26 units of rounding (2^-8), for parameters of few elements"},
                    larger({kBfloat16ParameterNoise * floor, "bfloat16: 3 x the parameter's own noise floor"},
                           {kBfloat16ParameterNoise * whole_floor, "bfloat16: 3 x the noise floor of the whole"}));
  }
  return {};
}

}  // namespace longstraw::compare
