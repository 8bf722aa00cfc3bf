#pragma once
// What deviation the dtype of a computation explains, each bound with its reason. docs/comparator.md derives them.
//
//              over all parameters                                    on each parameter
//   float64    1e-12                                                  1e-10
//   float32    1e-5, and noise_factor x the noise floor               1e-3, or 10 x the parameter's own noise floor
//   bfloat16   the candidate's error against the wide record at most  3 x the parameter's own noise floor, at least 0.1
//              bfloat16_factor x the reference's own
//
// The noise floor is the reference's own distance from a wider record of the same run (`noise`: the reference arm in float64
// or, under bfloat16, float32). Without it only the fixed bounds are left; under bfloat16 that is 16 units of rounding.

#include <optional>
#include <string>

#include "compare/config.h"
#include "compare/measure.h"

namespace longstraw::compare {

enum class Dtype { kFloat64, kFloat32, kBfloat16 };

// FormatError, naming the record, for another dtype than float64, float32, bfloat16.
Dtype dtype_of(const core::record::RecordReader& record);
// The one with the fewer digits: its rounding is in the difference.
Dtype coarser(Dtype a, Dtype b);
const char* name_of_dtype(Dtype dtype);

// Distances from the noise record, measured once a comparison.
struct NoiseMeasure {
  StepMeasure reference;  // reference against the noise record
  StepMeasure candidate;  // candidate against the noise record
};

struct Bound {
  double value = 0;
  std::string reason;
};

class Bounds {
 public:
  // `noise` may be null; else it must outlive this object.
  Bounds(Dtype dtype, const CompareConfig& config, const NoiseMeasure* noise);

  Dtype dtype() const { return dtype_; }
  // On the candidate's distance from the reference.
  const std::optional<Bound>& whole() const { return whole_; }
  // On the same distance, from the measured noise floor.
  const std::optional<Bound>& noise_floor() const { return noise_floor_; }
  // bfloat16: on the candidate's distance from the noise record.
  const std::optional<Bound>& wide() const { return wide_; }
  Bound parameter(const std::string& name) const;

 private:
  Dtype dtype_;
  CompareConfig config_;
  const NoiseMeasure* noise_;
  std::optional<Bound> whole_, noise_floor_, wide_;
};

}  // namespace longstraw::compare
