// Causes that show in single parameters: values that are not there, have the wrong sign or a constant factor.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "compare/deviations.h"
#include "compare/names.h"

namespace longstraw::compare {
namespace {

constexpr double kCosineResolution = 1e-7;  // sqrt(1 - cosine^2) in double can't tell a smaller residual from none

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }
bool is_bias(const std::string& name) { return name.ends_with(".bias"); }
bool is_key_or_value(const std::string& name) {
  return contains(name, "k_proj") || contains(name, "v_proj") || contains(name, "kv_a") || contains(name, "kv_b");
}

template <class Predicate>
bool all(const std::vector<std::string>& names, Predicate predicate) {
  return !names.empty() && std::all_of(names.begin(), names.end(), predicate);
}

// What a set of parameters without gradient has in common.
std::string name_of_absence(const std::vector<std::string>& names, const char* otherwise) {
  if (all(names, is_bias)) return "missing_bias_gradient";
  if (all(names, is_key_or_value)) return "missing_key_value_gradient";
  if (all(names, [](const auto& name) { return contains(name, "shared_expert_gate"); })) return "missing_shared_expert_gate";
  return otherwise;
}

bool is_zeroed(const ParameterMeasure& p) { return p.statistics.candidate_nonzero == 0 && p.statistics.reference_nonzero > 0; }

std::vector<std::string> take_zeroed_layers(Deviations& deviations, std::map<std::int64_t, std::vector<std::string>> zeroed,
                                            const std::vector<std::string>& names) {
  std::vector<std::string> rest = names;
  for (const auto& [layer, members] : zeroed) {
    const auto& statistics = deviations.input().measure.by_layer.at(layer);
    if (statistics.candidate_nonzero != 0 || members.size() < 2) continue;
    deviations.add("zeroed_layer",
                   fmt::format("layer {}: all {} gradients are zero, the reference's norm is {:.3e}", layer, members.size(),
                               statistics.reference_norm()),
                   members);
    std::erase_if(rest, [&](const auto& name) { return std::find(members.begin(), members.end(), name) != members.end(); });
  }
  return rest;
}

// "1/4", "3": a factor in words when it is close to a small fraction.
std::string factor_name(double factor, double tolerance) {
  for (int denominator = 1; denominator <= 64; ++denominator) {
    const double numerator = std::round(factor * denominator);
    if (numerator >= 1 && numerator <= 64 && std::abs(factor * denominator / numerator - 1) <= tolerance &&
        (numerator == 1 || denominator == 1 || denominator <= 8)) {
      return denominator == 1 ? fmt::format("{}", numerator) : fmt::format("{}/{}", numerator, denominator);
    }
  }
  return fmt::format("{:.6g}", factor);
}

std::string factor_hint(double factor) {
  return factor < 1 ? "a reduction over ranks or responses is missing, or a mean was divided once too often"
                    : "something was counted several times, or a mean was not divided";
}

}  // namespace

void find_nonfinite(Deviations& deviations) {
  std::vector<std::string> names;
  std::string first;
  for (const auto& p : deviations.input().measure.parameters) {
    if (p.statistics.unmatched_nonfinite == 0) continue;
    names.push_back(p.name);
    if (first.empty()) {
      first = fmt::format("{} of {} values of {} (the first at index {})", p.statistics.unmatched_nonfinite, p.statistics.elements,
                          p.name, p.statistics.first_unmatched);
    }
  }
  if (names.empty()) return;
  deviations.add("non_finite", fmt::format("NaN or infinity on one side only in {} parameters: {}", names.size(), first), names);
}

void find_missing(Deviations& deviations) {
  const auto& measure = deviations.input().measure;
  if (!measure.only_in_reference.empty()) {
    deviations.add(name_of_absence(measure.only_in_reference, "missing_parameter"),
                   fmt::format("the candidate has no gradient of {}", listed(measure.only_in_reference)),
                   measure.only_in_reference);
  }
  if (!measure.only_in_candidate.empty()) {
    deviations.add("additional_parameter", fmt::format("the reference has no gradient of {}", listed(measure.only_in_candidate)),
                   measure.only_in_candidate);
  }
  for (const auto& shape : measure.shapes) {
    const bool reversed =
        std::equal(shape.reference.begin(), shape.reference.end(), shape.candidate.rbegin(), shape.candidate.rend());
    deviations.add(
        reversed ? "transposed_parameter" : "different_shape",
        fmt::format("{}: shape {}x{} against {}x{}", shape.name, shape.candidate.empty() ? 0 : shape.candidate.front(),
                    shape.candidate.empty() ? 0 : shape.candidate.back(), shape.reference.empty() ? 0 : shape.reference.front(),
                    shape.reference.empty() ? 0 : shape.reference.back()),
        {shape.name});
  }
}

void find_zeroed(Deviations& deviations) {
  std::vector<std::string> names;
  std::map<std::int64_t, std::vector<std::string>> by_layer;
  for (const auto* p : deviations.open()) {
    if (!is_zeroed(*p)) continue;
    names.push_back(p->name);
    if (const auto layer = layer_of(p->name)) by_layer[*layer].push_back(p->name);
  }
  if (names.empty()) return;
  const auto& whole = deviations.input().measure.whole;
  if (whole.candidate_nonzero == 0) {
    deviations.add("zero_gradient",
                   fmt::format("the whole gradient is zero, the reference's norm is {:.3e}", whole.reference_norm()), names);
    return;
  }
  const auto rest = take_zeroed_layers(deviations, by_layer, names);
  if (rest.empty()) return;
  deviations.add(name_of_absence(rest, "zeroed_parameter"),
                 fmt::format("the gradient is zero, the reference's is not: {}", listed(rest)), rest);
}

void find_gradient_of_indexer(Deviations& deviations) {
  std::vector<std::string> names;
  for (const auto* p : deviations.open()) {
    if (is_indexer(kind_of(p->name)) && p->statistics.reference_nonzero == 0) names.push_back(p->name);
  }
  if (names.empty()) return;
  deviations.add("gradient_of_indexer",
                 fmt::format("{} have a gradient, the reference's is zero: the choice of keys is a constant", listed(names)),
                 names);
}

void find_wrong_sign(Deviations& deviations) {
  std::vector<std::string> names;
  double highest = -1;
  for (const auto* p : deviations.open()) {
    // Beyond the residual that rounding leaves, a reversed gradient is reversed in every element.
    if (!(p->statistics.cosine() < 0) || p->statistics.residual() > std::max(deviations.tolerance(p->name), kCosineResolution))
      continue;
    names.push_back(p->name);
    highest = std::max(highest, p->statistics.cosine());
  }
  if (names.empty()) return;
  const bool whole = names.size() == deviations.input().measure.parameters.size();
  deviations.add("wrong_sign", fmt::format("{}: cosine {:.6f}", whole ? "the whole gradient is reversed" : listed(names), highest),
                 names);
}

void find_constant_factor(Deviations& deviations) {
  struct Group {
    double factor;
    double tolerance;
    std::vector<std::string> names;
  };
  std::vector<Group> groups;
  for (const auto* p : deviations.open()) {
    const double residual = std::max(p->statistics.residual(), kCosineResolution);
    const double factor = p->statistics.norm_ratio();
    const bool parallel = p->statistics.cosine() > 0 && residual <= std::max(deviations.tolerance(p->name), 10 * kCosineResolution);
    if (!parallel || !(std::abs(factor - 1) > 10 * residual)) continue;
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
      return std::abs(factor / g.factor - 1) <= 10 * std::max(residual, g.tolerance);
    });
    if (same == groups.end()) {
      groups.push_back({factor, residual, {p->name}});
    } else {
      same->names.push_back(p->name);
    }
  }
  std::sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.names.size() > b.names.size(); });
  for (const auto& group : groups) {
    const bool whole = group.names.size() == deviations.input().measure.parameters.size();
    deviations.add("constant_factor",
                   fmt::format("{} is {} times the reference's, with the same direction: {}",
                               whole ? "the whole gradient" : fmt::format("the gradient of {}", listed(group.names)),
                               factor_name(group.factor, 10 * group.tolerance), factor_hint(group.factor)),
                   group.names);
  }
}

}  // namespace longstraw::compare
