#include "compare/judge.h"

#include <algorithm>

namespace longstraw::compare {
namespace {

Check check(std::string what, double measured, const Bound& bound, std::string parameter = {}) {
  return {.what = std::move(what),
          .measured = measured,
          .bound = bound.value,
          .reason = bound.reason,
          .parameter = std::move(parameter),
          .pass = measured <= bound.value};
}

// The parameter that comes closest to its bound or exceeds it most.
std::optional<Check> worst_parameter(const StepMeasure& measure, const Bounds& bounds) {
  std::optional<Check> worst;
  double worst_share = -1;
  for (const auto& parameter : measure.parameters) {
    const double error = parameter.statistics.relative_l2();
    const Bound bound = bounds.parameter(parameter.name);
    const double share = error == 0 ? 0 : error / bound.value;
    if (!worst || !(share <= worst_share)) {
      worst = check("relative L2 of each parameter", error, bound, parameter.name);
      worst_share = share;
    }
  }
  return worst;
}

Check same_parameters(const StepMeasure& measure) {
  const auto different = measure.only_in_reference.size() + measure.only_in_candidate.size() + measure.shapes.size();
  std::string first;
  if (!measure.only_in_reference.empty()) first = measure.only_in_reference.front();
  else if (!measure.only_in_candidate.empty()) first = measure.only_in_candidate.front();
  else if (!measure.shapes.empty()) first = measure.shapes.front().name;
  return check("parameters on one side only or of another shape", static_cast<double>(different),
               {0, "both sides have the same parameters"}, first);
}

Check nonfinite(const StepMeasure& measure) {
  std::string first;
  for (const auto& parameter : measure.parameters) {
    if (first.empty() && parameter.statistics.unmatched_nonfinite > 0) first = parameter.name;
  }
  return check("non-finite values that the other side does not have", static_cast<double>(measure.whole.unmatched_nonfinite),
               {0, "a non-finite value is an infinite error"}, first);
}

}  // namespace

bool Judgement::pass() const {
  return !checks.empty() && std::all_of(checks.begin(), checks.end(), [](const Check& c) { return c.pass; });
}

Judgement judge(const StepMeasure& measure, const NoiseMeasure* noise, const Bounds& bounds) {
  Judgement result;
  if (noise != nullptr) result.noise_floor = noise->reference.whole.relative_l2();
  result.checks.push_back(same_parameters(measure));
  result.checks.push_back(nonfinite(measure));
  const double error = measure.whole.relative_l2();
  if (bounds.whole()) result.checks.push_back(check("relative L2 over all parameters", error, *bounds.whole()));
  if (bounds.noise_floor()) result.checks.push_back(check("relative L2 in terms of the noise floor", error, *bounds.noise_floor()));
  if (bounds.wide() && noise != nullptr) {
    result.checks.push_back(check("relative L2 from the wide record", noise->candidate.whole.relative_l2(), *bounds.wide()));
  }
  if (auto worst = worst_parameter(measure, bounds)) result.checks.push_back(*worst);
  // Two records without a single common gradient agree on nothing.
  if (measure.parameters.empty()) result.checks.push_back(check("parameters compared", 0, {-1, "at least one"}));
  return result;
}

}  // namespace longstraw::compare
