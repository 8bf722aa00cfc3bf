#include "compare/measure.h"

#include <algorithm>
#include <set>

#include "compare/names.h"

namespace longstraw::compare {
namespace {

using core::record::GradientInfo;
using core::record::GradientReader;
using core::record::RecordReader;
using core::record::Sketch;

constexpr std::int64_t kBlock = std::int64_t{1} << 16;  // elements; both blocks fit into the second-level cache

using Shapes = std::map<std::string, std::vector<std::int64_t>>;

Shapes gradient_shapes(const RecordReader& record, std::int64_t step) {
  Shapes shapes;
  for (const GradientInfo& info : record.gradients(step)) shapes[info.name] = info.shape;
  return shapes;
}

std::set<std::string> sketch_names(const RecordReader& record, std::int64_t step) {
  const auto names = record.sketch_names(step);
  return {names.begin(), names.end()};
}

PairStatistics measure_sketches(const Sketch& reference, const Sketch& candidate) {
  PairStatistics s;
  s.estimated = true;
  s.elements = 1;
  for (const std::int64_t dim : reference.shape) s.elements *= dim;
  s.reference_nonfinite = reference.nonfinite;
  s.candidate_nonfinite = candidate.nonfinite;
  // Sketches do not know where: an unequal number is a certain mismatch.
  s.unmatched_nonfinite = std::abs(reference.nonfinite - candidate.nonfinite);
  s.dot = core::record::inner_product(reference, candidate);
  s.reference_squares = reference.squared_norm;
  s.candidate_squares = candidate.squared_norm;
  const long double distance = core::record::distance(reference, candidate);
  s.difference_squares = distance * distance;
  s.reference_nonzero = reference.squared_norm > 0 ? s.elements : 0;
  s.candidate_nonzero = candidate.squared_norm > 0 ? s.elements : 0;
  return s;
}

void add_parameter(StepMeasure& result, ParameterMeasure parameter) {
  parameter.statistics.max_error_parameter = parameter.name;
  if (const auto layer = layer_of(parameter.name)) result.by_layer[*layer].merge(parameter.statistics);
  result.by_kind[kind_of(parameter.name)].merge(parameter.statistics);
  result.whole.merge(parameter.statistics);
  result.parameters.push_back(std::move(parameter));
}

}  // namespace

const ParameterMeasure* StepMeasure::find(const std::string& name) const {
  for (const auto& parameter : parameters) {
    if (parameter.name == name) return &parameter;
  }
  return nullptr;
}

const ParameterMeasure* StepMeasure::worst() const {
  const ParameterMeasure* worst = nullptr;
  for (const auto& parameter : parameters) {
    if (worst == nullptr || parameter.statistics.relative_l2() > worst->statistics.relative_l2()) worst = &parameter;
  }
  return worst;
}

PairStatistics measure_pair(const GradientReader& reference, const GradientReader& candidate) {
  PairStatistics statistics;
  const std::int64_t total = std::min(reference.info().elements, candidate.info().elements);
  std::vector<double> b(static_cast<std::size_t>(std::min(kBlock, total))), a(b.size());
  for (std::int64_t offset = 0; offset < total; offset += kBlock) {
    const std::int64_t count = std::min(kBlock, total - offset);
    reference.read(offset, count, b.data());
    candidate.read(offset, count, a.data());
    accumulate(statistics, offset, b.data(), a.data(), count);
  }
  return statistics;
}

StepMeasure measure_step(const RecordReader& reference, const RecordReader& candidate, std::int64_t step) {
  StepMeasure result;
  result.step = step;
  const Shapes reference_shapes = gradient_shapes(reference, step), candidate_shapes = gradient_shapes(candidate, step);
  const auto reference_sketches = sketch_names(reference, step), candidate_sketches = sketch_names(candidate, step);
  std::set<std::string> names(reference_sketches.begin(), reference_sketches.end());
  names.insert(candidate_sketches.begin(), candidate_sketches.end());
  for (const auto& [name, shape] : reference_shapes) names.insert(name);
  for (const auto& [name, shape] : candidate_shapes) names.insert(name);

  for (const auto& name : names) {
    const auto b = reference_shapes.find(name), a = candidate_shapes.find(name);
    if (b != reference_shapes.end() && a != candidate_shapes.end()) {
      if (a->second != b->second) {
        result.shapes.push_back({name, b->second, a->second});
        continue;
      }
      add_parameter(result, {name, b->second, measure_pair(reference.gradient(step, name), candidate.gradient(step, name))});
    } else if (reference_sketches.contains(name) && candidate_sketches.contains(name)) {
      const Sketch sketch_b = reference.sketch(step, name), sketch_a = candidate.sketch(step, name);
      if (sketch_a.shape != sketch_b.shape) {
        result.shapes.push_back({name, sketch_b.shape, sketch_a.shape});
        continue;
      }
      add_parameter(result, {name, sketch_b.shape, measure_sketches(sketch_b, sketch_a)});
    } else if (b != reference_shapes.end() || reference_sketches.contains(name)) {
      result.only_in_reference.push_back(name);
    } else {
      result.only_in_candidate.push_back(name);
    }
  }
  return result;
}

}  // namespace longstraw::compare
