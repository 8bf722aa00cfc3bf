#include "compare/study.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "compare/names.h"
#include "compare/statistics.h"
#include "core/base/errors.h"

namespace longstraw::compare {

using core::record::StudyCell;
using core::record::StudyRow;
using core::record::StudyScope;

namespace {

constexpr std::int64_t kBlock = std::int64_t{1} << 15;  // elements; both blocks, as double, fit into the second-level cache
constexpr std::int64_t kOutside = -1;                   // the layer of parameters outside the layers

int sign_of(double x) { return (x > 0) - (x < 0); }

struct GroupSums {
  PairStatistics pair;
  std::int64_t sign_dot = 0;  // elements of equal sign less those of opposite sign

  void merge(const GroupSums& other) {
    pair.merge(other.pair);
    sign_dot += other.sign_dot;
  }
};

double sign_cosine(const GroupSums& sums) {
  const auto& p = sums.pair;
  if (p.unmatched_nonfinite > 0) return p.cosine();  // NaN: what a step along such signs does is unknown
  if (p.reference_nonzero == 0 && p.candidate_nonzero == 0) return 1;
  if (p.reference_nonzero == 0 || p.candidate_nonzero == 0) return 0;
  return static_cast<double>(sums.sign_dot) /
         (std::sqrt(static_cast<double>(p.reference_nonzero)) * std::sqrt(static_cast<double>(p.candidate_nonzero)));
}

StudyRow row_of(StudyScope scope, std::int64_t layer, std::string kind, const GroupSums& sums) {
  const auto& p = sums.pair;
  return {.scope = scope,
          .layer = layer,
          .kind = std::move(kind),
          .elements = p.elements,
          .reference_norm = p.reference_norm(),
          .candidate_norm = p.candidate_norm(),
          .difference_norm = p.difference_norm(),
          .cosine = p.cosine(),
          .relative_l2 = p.relative_l2(),
          .norm_ratio = p.norm_ratio(),
          .sign_agreement = p.sign_agreement(),
          .update_cosine = p.update_cosine(),
          .sign_cosine = sign_cosine(sums)};
}

}  // namespace

struct StudyMeasurement::Sums {
  std::set<std::string> names;
  std::map<std::pair<std::int64_t, std::string>, GroupSums> groups;  // by layer and kind: what all rows are merged from
};

StudyMeasurement::StudyMeasurement() : sums_(std::make_unique<Sums>()) {}
StudyMeasurement::~StudyMeasurement() = default;
StudyMeasurement::StudyMeasurement(StudyMeasurement&&) noexcept = default;

template <class T>
void StudyMeasurement::add_values(const std::string& name, std::span<const T> reference, std::span<const T> candidate) {
  if (reference.size() != candidate.size()) {
    throw ConfigError(fmt::format("study: gradient {}: {} elements, expected {}", name, candidate.size(), reference.size()));
  }
  if (!sums_->names.insert(name).second) throw ConfigError(fmt::format("study: gradient {}: given twice", name));
  GroupSums& sums = sums_->groups[{layer_of(name).value_or(kOutside), kind_of(name)}];
  const auto total = static_cast<std::int64_t>(reference.size());
  std::vector<double> b(static_cast<std::size_t>(std::min(kBlock, total))), a(b.size());
  for (std::int64_t offset = 0; offset < total; offset += kBlock) {
    const std::int64_t count = std::min(kBlock, total - offset);
    std::copy_n(reference.data() + offset, count, b.data());
    std::copy_n(candidate.data() + offset, count, a.data());
    accumulate(sums.pair, offset, b.data(), a.data(), count);
    std::int64_t signs = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      signs += sign_of(a[static_cast<std::size_t>(i)]) * sign_of(b[static_cast<std::size_t>(i)]);
    }
    sums.sign_dot += signs;
  }
}

void StudyMeasurement::add(const std::string& name, std::span<const float> reference, std::span<const float> candidate) {
  add_values(name, reference, candidate);
}

void StudyMeasurement::add(const std::string& name, std::span<const double> reference, std::span<const double> candidate) {
  add_values(name, reference, candidate);
}

std::vector<StudyRow> StudyMeasurement::rows() const {
  GroupSums whole;
  std::map<std::int64_t, GroupSums> by_layer;
  std::map<std::string, GroupSums> by_kind;
  for (const auto& [place, sums] : sums_->groups) {
    const auto& [layer, kind] = place;
    whole.merge(sums);
    if (layer != kOutside) by_layer[layer].merge(sums);
    by_kind[kind].merge(sums);
  }
  std::vector<StudyRow> rows{row_of(StudyScope::kWhole, kOutside, {}, whole)};
  for (const auto& [layer, sums] : by_layer) rows.push_back(row_of(StudyScope::kLayer, layer, {}, sums));
  for (const auto& [kind, sums] : by_kind) rows.push_back(row_of(StudyScope::kKind, kOutside, kind, sums));
  for (const auto& [place, sums] : sums_->groups) {
    rows.push_back(row_of(StudyScope::kLayerAndKind, place.first, place.second, sums));
  }
  return rows;
}

}  // namespace longstraw::compare
