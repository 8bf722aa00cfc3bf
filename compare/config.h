#pragma once
// The `compare` section of the configuration: which arms decide, and how strict the bounds are. docs/comparator.md
// derives the defaults.

#include <optional>
#include <string>
#include <vector>

#include "core/config/fields.h"

namespace longstraw::compare {

struct CompareConfig {
  std::vector<std::string> gate{"exact"};
  double noise_factor = 2.0;
  double bfloat16_factor = 1.1;
  std::optional<double> whole_bound;
  std::optional<double> parameter_bound;

  static constexpr auto fields() {
    using C = CompareConfig;
    using namespace core::config;
    return std::tuple{
        field("gate", &C::gate, "arms whose verdict decides the run's; the other arms are judged but do not decide"),
        field("noise_factor", &C::noise_factor, "float32: allowed error in multiples of the reference's own distance from float64",
              above(0)),
        field("bfloat16_factor", &C::bfloat16_factor,
              "bfloat16: allowed error against the wide record in multiples of the reference's own", above(0)),
        field("whole_bound", &C::whole_bound, "relative L2 allowed over all parameters; null: the dtype's bound", at_least(0)),
        field("parameter_bound", &C::parameter_bound, "relative L2 allowed on each parameter; null: the dtype's bound",
              at_least(0)),
    };
  }
  bool operator==(const CompareConfig&) const = default;
};

}  // namespace longstraw::compare
