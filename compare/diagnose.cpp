#include "compare/diagnose.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "compare/deviations.h"

namespace longstraw::compare {

Deviations::Deviations(const DiagnosisInput& input) : input_(input) {
  for (const auto& parameter : input.measure.parameters) {
    if (!(parameter.statistics.relative_l2() <= tolerance(parameter.name))) deviating_.insert(parameter.name);
  }
}

std::vector<const ParameterMeasure*> Deviations::open() const {
  std::vector<const ParameterMeasure*> result;
  for (const auto& parameter : input_.measure.parameters) {
    if (is_open(parameter.name)) result.push_back(&parameter);
  }
  return result;
}

double Deviations::tolerance(const std::string& name) const { return input_.bounds.parameter(name).value; }

void Deviations::add(std::string name, std::string evidence, std::vector<std::string> parameters) {
  explained_.insert(parameters.begin(), parameters.end());
  findings_.push_back({std::move(name), std::move(evidence), std::move(parameters)});
}

std::string listed(const std::vector<std::string>& names, std::size_t most) {
  const auto last = names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), most));
  const std::string text = fmt::format("{}", fmt::join(names.begin(), last, ", "));
  return names.size() <= most ? text : fmt::format("{} and {} more", text, names.size() - most);
}

std::vector<Finding> diagnose(const DiagnosisInput& input) {
  Deviations deviations(input);
  // From what is certain to what is likely: a missing value first, patterns over the whole model last.
  find_nonfinite(deviations);
  find_missing(deviations);
  find_zeroed(deviations);
  find_gradient_of_indexer(deviations);
  find_wrong_sign(deviations);
  find_constant_factor(deviations);
  find_exchanged(deviations);
  find_transposed(deviations);
  find_in_responses(deviations);
  find_earlier_step(deviations);
  find_state_adjoints(deviations);
  find_cut_prompt(deviations);
  find_in_token_rows(deviations);
  const auto open = deviations.open();
  if (!open.empty()) {
    const auto worst = *std::max_element(open.begin(), open.end(), [](const auto* a, const auto* b) {
      return a->statistics.relative_l2() < b->statistics.relative_l2();
    });
    std::vector<std::string> names;
    for (const auto* parameter : open) names.push_back(parameter->name);
    deviations.add(
        "unexplained",
        fmt::format("{} parameters are beyond their bound and fit no known pattern; the worst is {} (relative L2 {:.2e})",
                    names.size(), worst->name, worst->statistics.relative_l2()),
        names);
  }
  return deviations.take();
}

}  // namespace longstraw::compare
