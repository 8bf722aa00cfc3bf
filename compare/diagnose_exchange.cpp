// Causes in which a gradient is right but in the wrong place: of another parameter, another step, or transposed.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "compare/deviations.h"
#include "compare/names.h"

namespace longstraw::compare {
namespace {

constexpr std::int64_t kBandRows = 64;
constexpr std::size_t kEarlierProbes = 6;  // parameters that decide whether a gradient is an older one
constexpr double kNormResolution = 1e-9;

double distance(const Deviations& d, const std::string& reference, const std::string& candidate) {
  const auto& in = d.input();
  return measure_pair(in.reference.gradient(in.measure.step, reference), in.candidate.gradient(in.measure.step, candidate))
      .relative_l2();
}

bool norms_match(const ParameterMeasure& candidate, const ParameterMeasure& reference, double tolerance) {
  const double a = candidate.statistics.candidate_norm(), b = reference.statistics.reference_norm();
  return b > 0 && std::abs(a / b - 1) <= std::max(tolerance, kNormResolution);
}

// Two parameters whose gradients stand in each other's place.
struct Exchange {
  std::string first, second;
};

std::vector<Exchange> find_exchanges(const Deviations& deviations) {
  std::map<std::vector<std::int64_t>, std::vector<const ParameterMeasure*>> by_shape;
  for (const auto* p : deviations.open()) {
    if (!p->statistics.estimated) by_shape[p->shape].push_back(p);
  }
  std::vector<Exchange> found;
  std::set<std::string> used;
  for (const auto& [shape, group] : by_shape) {
    for (std::size_t i = 0; i < group.size(); ++i) {
      for (std::size_t k = i + 1; k < group.size() && !used.contains(group[i]->name); ++k) {
        const auto &p = *group[i], &q = *group[k];
        if (used.contains(q.name)) continue;
        const double tolerance = std::max(deviations.tolerance(p.name), deviations.tolerance(q.name));
        // Norms are known already and rule out nearly all pairs before anything is read again.
        if (!norms_match(p, q, tolerance) || !norms_match(q, p, tolerance)) continue;
        if (!(distance(deviations, q.name, p.name) <= tolerance) || !(distance(deviations, p.name, q.name) <= tolerance)) continue;
        used.insert({p.name, q.name});
        found.push_back({p.name, q.name});
      }
    }
  }
  return found;
}

// Walks the reference in bands of rows; the candidate's part of a band is a stretch of each of its own rows.
bool is_transposed(const Deviations& d, const ParameterMeasure& p) {
  const auto& in = d.input();
  const auto a = in.candidate.gradient(in.measure.step, p.name), b = in.reference.gradient(in.measure.step, p.name);
  const std::int64_t rows = p.shape[0], columns = p.shape[1];
  const auto tolerance = static_cast<long double>(d.tolerance(p.name));
  std::vector<double> band(static_cast<std::size_t>(std::min(kBandRows, rows) * columns));
  std::vector<double> stretch(static_cast<std::size_t>(std::min(kBandRows, rows)));
  long double difference = 0, squares = 0;
  for (std::int64_t first = 0; first < rows; first += kBandRows) {
    const std::int64_t count = std::min(kBandRows, rows - first);
    b.read(first * columns, count * columns, band.data());
    for (std::int64_t j = 0; j < columns; ++j) {
      a.read(j * rows + first, count, stretch.data());
      for (std::int64_t i = 0; i < count; ++i) {
        const double wanted = band[static_cast<std::size_t>(i * columns + j)];
        const double error = stretch[static_cast<std::size_t>(i)] - wanted;
        difference += error * error;
        squares += wanted * wanted;
      }
    }
    // Nearly always the first band rules a transpose out.
    const long double all = static_cast<long double>(p.statistics.reference_squares);
    if (difference > tolerance * tolerance * all) return false;
  }
  return difference <= tolerance * tolerance * squares;
}

// Relative distance of the candidate's gradient at `step` from weight * reference(step) + reference(earlier).
double distance_from_earlier(const Deviations& d, const std::string& name, std::int64_t earlier, double weight) {
  const auto& in = d.input();
  const auto a = in.candidate.gradient(in.measure.step, name), b = in.reference.gradient(in.measure.step, name),
             old = in.reference.gradient(earlier, name);
  if (old.info().shape != a.info().shape) return HUGE_VAL;
  constexpr std::int64_t kBlock = 1 << 16;
  std::vector<double> va(kBlock), vb(kBlock), vo(kBlock);
  long double difference = 0, squares = 0;
  for (std::int64_t offset = 0; offset < a.info().elements; offset += kBlock) {
    const std::int64_t count = std::min(kBlock, a.info().elements - offset);
    a.read(offset, count, va.data());
    b.read(offset, count, vb.data());
    old.read(offset, count, vo.data());
    for (std::int64_t i = 0; i < count; ++i) {
      const long double wanted = static_cast<long double>(weight) * vb[i] + vo[i];
      difference += (va[i] - wanted) * (va[i] - wanted);
      squares += wanted * wanted;
    }
  }
  return squares == 0 ? HUGE_VAL : static_cast<double>(std::sqrt(difference / squares));
}

bool all_probes(const Deviations& d, const std::vector<std::string>& probes, std::int64_t earlier, double weight) {
  return std::all_of(probes.begin(), probes.end(), [&](const auto& name) {
    return distance_from_earlier(d, name, earlier, weight) <= std::max(d.tolerance(name), kNormResolution);
  });
}

// The step before `step` in the reference that has all the probes.
std::optional<std::int64_t> step_before(const Deviations& d, const std::vector<std::string>& probes) {
  std::optional<std::int64_t> before;
  for (const std::int64_t step : d.input().reference.steps()) {
    if (step < d.input().measure.step) before = step;
  }
  if (!before) return before;
  std::set<std::string> names;
  for (const auto& info : d.input().reference.gradients(*before)) names.insert(info.name);
  const bool complete = std::all_of(probes.begin(), probes.end(), [&](const auto& name) { return names.contains(name); });
  return complete ? before : std::nullopt;
}

}  // namespace

void find_exchanged(Deviations& deviations) {
  const auto exchanges = find_exchanges(deviations);
  std::map<std::string, std::vector<std::string>> experts;
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<std::string>> layers;
  std::vector<std::string> rest;
  for (const auto& [first, second] : exchanges) {
    const auto a = layer_of(first), b = layer_of(second);
    if (a && b && *a != *b && kind_of(first) == kind_of(second)) {
      auto& names = layers[std::minmax(*a, *b)];
      names.insert(names.end(), {first, second});
    } else if (const auto e = expert_of(first), f = expert_of(second);
               e && f && *e != *f && a == b && kind_of(first) == kind_of(second)) {
      auto& names = experts[fmt::format("layer {}: experts {} and {}", a.value_or(0), std::min(*e, *f), std::max(*e, *f))];
      names.insert(names.end(), {first, second});
    } else {
      rest.insert(rest.end(), {first, second});
    }
  }
  for (const auto& [which, names] : experts) {
    deviations.add("swapped_experts", fmt::format("{} have each other's gradients in {} parameters", which, names.size()), names);
  }
  for (const auto& [pair, names] : layers) {
    if (names.size() < 4) {
      rest.insert(rest.end(), names.begin(), names.end());
      continue;
    }
    deviations.add(
        "swapped_layers",
        fmt::format("layers {} and {} have each other's gradients in {} parameters", pair.first, pair.second, names.size()), names);
  }
  for (std::size_t i = 0; i + 1 < rest.size(); i += 2) {
    deviations.add("swapped_parameters", fmt::format("{} and {} have each other's gradients", rest[i], rest[i + 1]),
                   {rest[i], rest[i + 1]});
  }
}

void find_transposed(Deviations& deviations) {
  for (const auto* p : deviations.open()) {
    if (p->shape.size() != 2 || p->shape[0] < 2 || p->shape[1] < 2) continue;
    if (p->statistics.estimated || !norms_match(*p, *p, deviations.tolerance(p->name))) continue;
    if (!is_transposed(deviations, *p)) continue;
    deviations.add("transposed_parameter",
                   fmt::format("{} ({} x {}) is the reference's, transposed", p->name, p->shape[0], p->shape[1]), {p->name});
  }
}

void find_earlier_step(Deviations& deviations) {
  auto open = deviations.open();
  std::erase_if(open, [](const auto* p) { return p->statistics.estimated; });
  if (open.size() < 2) return;
  // The smallest ones decide: reading three gradients of all parameters would cost more than the comparison.
  std::sort(open.begin(), open.end(), [](const auto* a, const auto* b) { return a->statistics.elements < b->statistics.elements; });
  std::vector<std::string> probes;
  for (std::size_t i = 0; i < std::min(kEarlierProbes, open.size()); ++i) probes.push_back(open[i]->name);
  const auto earlier = step_before(deviations, probes);
  if (!earlier) return;
  std::vector<std::string> names;
  for (const auto* p : open) names.push_back(p->name);
  const auto step = deviations.input().measure.step;
  if (all_probes(deviations, probes, *earlier, 0)) {
    deviations.add("stale_gradient",
                   fmt::format("step {} repeats the gradient of step {} ({} of {} parameters examined)", step, *earlier,
                               probes.size(), names.size()),
                   names);
  } else if (all_probes(deviations, probes, *earlier, 1)) {
    deviations.add("gradient_not_cleared",
                   fmt::format("step {} is the sum of the gradients of steps {} and {} ({} of {} parameters examined)", step,
                               *earlier, step, probes.size(), names.size()),
                   names);
  }
}

}  // namespace longstraw::compare
