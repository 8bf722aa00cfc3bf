#pragma once
// Measures one step of two records, streaming both: memory is two blocks of elements, whatever the model's size.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "compare/statistics.h"
#include "core/record/reader.h"

namespace longstraw::compare {

struct ParameterMeasure {
  std::string name;
  std::vector<std::int64_t> shape;
  PairStatistics statistics;
};

// A parameter that both have, with unequal shapes.
struct ShapeMismatch {
  std::string name;
  std::vector<std::int64_t> reference;
  std::vector<std::int64_t> candidate;
};

struct StepMeasure {
  std::int64_t step = 0;
  std::vector<ParameterMeasure> parameters;         // in increasing order of name
  std::map<std::int64_t, PairStatistics> by_layer;  // parameters outside the layers are not in it
  std::map<std::string, PairStatistics> by_kind;
  PairStatistics whole;
  std::vector<std::string> only_in_reference;
  std::vector<std::string> only_in_candidate;
  std::vector<ShapeMismatch> shapes;

  bool same_parameters() const { return only_in_reference.empty() && only_in_candidate.empty() && shapes.empty(); }
  const ParameterMeasure* find(const std::string& name) const;
  // The parameter with the largest relative L2; null without parameters.
  const ParameterMeasure* worst() const;
};

// A gradient that one side keeps only as a sketch is compared by sketches, where both have one.
StepMeasure measure_step(const core::record::RecordReader& reference, const core::record::RecordReader& candidate,
                         std::int64_t step);

// |candidate - reference| / |reference| of two gradients that may have different names or steps (used by the diagnosis).
PairStatistics measure_pair(const core::record::GradientReader& reference, const core::record::GradientReader& candidate);

}  // namespace longstraw::compare
