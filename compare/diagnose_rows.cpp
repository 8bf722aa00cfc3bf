// Causes that show in which tokens' rows of the output matrix deviate. The gradient of row v of the output matrix is dominated
// by the positions whose target is v: a factor on one member, or on the first position, shows as that factor on the rows of
// the tokens that only this member, or only first positions, have as target.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "compare/deviations.h"

namespace longstraw::compare {
namespace {

constexpr double kTolerance = 0.2;  // other positions contribute to a row through the softmax, without its token as target

// The candidate's rows as a multiple of the reference's: sum of <a, b> over sum of <b, b>.
struct Coefficient {
  double dot = 0, squares = 0;
  bool known() const { return squares > 0; }
  double value() const { return dot / squares; }
  bool is(double wanted) const { return known() && std::abs(value() - wanted) <= kTolerance * std::max(1.0, std::abs(wanted)); }
  void add(const Coefficient& other) {
    dot += other.dot;
    squares += other.squares;
  }
};

// Where a token is a target.
struct Use {
  std::set<std::size_t> responses;
  bool first = false, later = false;
};

using Responses = std::vector<core::record::ResponseRecord>;

std::map<std::int64_t, Use> uses_of(const Responses& responses) {
  std::map<std::int64_t, Use> uses;
  for (std::size_t i = 0; i < responses.size(); ++i) {
    const auto& r = responses[i];
    for (std::size_t t = 0; t < r.tokens.size(); ++t) {
      // Without weight in the loss it is no target, and no factor on it could show.
      if (r.mask[t] == 0 || r.advantage == 0) continue;
      Use& use = uses[r.tokens[t]];
      use.responses.insert(i);
      (t == 0 ? use.first : use.later) = true;
    }
  }
  return uses;
}

// The matrix whose rows are tokens: the output matrix, or the embedding that is tied to it.
const ParameterMeasure* output_matrix(const Deviations& d) {
  const ParameterMeasure* found = nullptr;
  for (const auto& p : d.input().measure.parameters) {
    if (p.shape.size() != 2 || p.statistics.estimated) continue;
    if (p.name.find("lm_head") != std::string::npos) return &p;
    if (p.name.find("embed") != std::string::npos) found = &p;
  }
  return found;
}

std::map<std::int64_t, Coefficient> row_coefficients(const Deviations& d, const ParameterMeasure& matrix,
                                                     const std::map<std::int64_t, Use>& uses) {
  const auto& in = d.input();
  const auto b = in.reference.gradient(in.measure.step, matrix.name), a = in.candidate.gradient(in.measure.step, matrix.name);
  const std::int64_t rows = matrix.shape[0], columns = matrix.shape[1];
  std::vector<double> row_b(static_cast<std::size_t>(columns)), row_a(row_b.size());
  std::map<std::int64_t, Coefficient> result;
  for (const auto& [token, use] : uses) {
    if (token < 0 || token >= rows) continue;
    b.read(token * columns, columns, row_b.data());
    a.read(token * columns, columns, row_a.data());
    Coefficient& c = result[token];
    for (std::size_t i = 0; i < row_b.size(); ++i) {
      c.dot += row_a[i] * row_b[i];
      c.squares += row_b[i] * row_b[i];
    }
  }
  return result;
}

std::vector<std::string> open_names(const Deviations& d) {
  std::vector<std::string> names;
  for (const auto* parameter : d.open()) names.push_back(parameter->name);
  return names;
}

bool find_boundary(Deviations& d, const std::string& matrix, const std::map<std::int64_t, Use>& uses,
                   const std::map<std::int64_t, Coefficient>& rows) {
  Coefficient first, later;
  for (const auto& [token, c] : rows) {
    const Use& use = uses.at(token);
    if (use.first && !use.later) first.add(c);
    if (use.later && !use.first) later.add(c);
  }
  if (!later.is(1) || !(first.is(0) || first.is(2))) return false;
  const bool twice = first.is(2);
  d.add(twice ? "double_counted_boundary_token" : "missing_boundary_token",
        fmt::format(
            "{}: rows of first response tokens are {:.2f} times the reference's, rows of later ones {:.2f} times: the position of "
            "the last prompt token, which predicts the first response token, counts {}",
            matrix, first.value(), later.value(), twice ? "twice" : "not at all"),
        open_names(d));
  return true;
}

bool find_member(Deviations& d, const std::string& matrix, const Responses& responses, const std::map<std::int64_t, Use>& uses,
                 const std::map<std::int64_t, Coefficient>& rows) {
  std::vector<Coefficient> own(responses.size());
  for (const auto& [token, c] : rows) {
    const auto& of = uses.at(token).responses;
    if (of.size() == 1) own[*of.begin()].add(c);
  }
  std::vector<std::size_t> off;
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (own[i].known() && !own[i].is(1)) off.push_back(i);
  }
  const auto name = [&](std::size_t i) { return fmt::format("member {} of group {}", responses[i].member, responses[i].group); };
  if (off.size() == 1 && (own[off[0]].is(0) || own[off[0]].is(2))) {
    const bool twice = own[off[0]].is(2);
    d.add(twice ? "double_counted_member" : "missing_member",
          fmt::format("{}: rows of tokens that only {} has are {:.2f} times the reference's, those of the others agree", matrix,
                      name(off[0]), own[off[0]].value()),
          open_names(d));
    return true;
  }
  if (off.size() != 2 || responses[off[0]].group != responses[off[1]].group) return false;
  const double ratio = responses[off[1]].advantage / responses[off[0]].advantage;
  if (!own[off[0]].is(ratio) || !own[off[1]].is(1 / ratio)) return false;
  d.add("swapped_members",
        fmt::format("{}: rows of tokens that only {} or {} has are {:.2f} and {:.2f} times the reference's: they have each other's "
                    "advantage",
                    matrix, name(off[0]), name(off[1]), own[off[0]].value(), own[off[1]].value()),
        open_names(d));
  return true;
}

}  // namespace

void find_in_token_rows(Deviations& d) {
  if (d.open().empty()) return;
  const ParameterMeasure* matrix = output_matrix(d);
  if (matrix == nullptr || !d.is_open(matrix->name)) return;
  const Responses responses = d.input().reference.responses(d.input().measure.step);
  if (responses.empty()) return;
  const auto uses = uses_of(responses);
  const auto rows = row_coefficients(d, *matrix, uses);
  if (!find_boundary(d, matrix->name, uses, rows)) find_member(d, matrix->name, responses, uses, rows);
}

}  // namespace longstraw::compare
