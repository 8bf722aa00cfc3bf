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

// The candidate's rows as multiples of the reference's, <a, b> / <b, b> each. The median stands for them all: a token that the
// prompt has too may carry, in a tied matrix, an embedding gradient that has nothing to do with it.
struct Multiples {
  std::vector<double> values;
  bool known() const { return !values.empty(); }
  double median() const {
    auto sorted = values;
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    if (sorted.size() % 2 == 1) return *middle;
    return (*middle + *std::max_element(sorted.begin(), middle)) / 2;
  }
  bool is(double wanted, double tolerance = kTolerance) const {
    return known() && std::abs(median() - wanted) <= tolerance * std::max(1.0, std::abs(wanted));
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

bool is_embedding(const ParameterMeasure& matrix) { return matrix.name.find("embed") != std::string::npos; }

// The matrix whose rows are tokens: the output matrix, or the embedding that is tied to it.
const ParameterMeasure* output_matrix(const Deviations& d) {
  const ParameterMeasure* found = nullptr;
  for (const auto& p : d.input().measure.parameters) {
    if (p.shape.size() != 2 || p.statistics.estimated) continue;
    if (p.name.find("lm_head") != std::string::npos) return &p;
    if (is_embedding(p)) found = &p;
  }
  return found;
}

std::map<std::int64_t, double> row_multiples(const Deviations& d, const ParameterMeasure& matrix,
                                             const std::map<std::int64_t, Use>& uses) {
  const auto& in = d.input();
  const auto b = in.reference.gradient(in.measure.step, matrix.name), a = in.candidate.gradient(in.measure.step, matrix.name);
  const std::int64_t rows = matrix.shape[0], columns = matrix.shape[1];
  std::vector<double> row_b(static_cast<std::size_t>(columns)), row_a(row_b.size());
  std::map<std::int64_t, double> result;
  for (const auto& [token, use] : uses) {
    if (token < 0 || token >= rows) continue;
    b.read(token * columns, columns, row_b.data());
    a.read(token * columns, columns, row_a.data());
    double dot = 0, squares = 0;
    for (std::size_t i = 0; i < row_b.size(); ++i) {
      dot += row_a[i] * row_b[i];
      squares += row_b[i] * row_b[i];
    }
    if (squares > 0) result[token] = dot / squares;
  }
  return result;
}

std::vector<std::string> open_names(const Deviations& d) {
  std::vector<std::string> names;
  for (const auto* parameter : d.open()) names.push_back(parameter->name);
  return names;
}

// In a tied matrix the row of a first token also has the gradient of that token as input, which no factor on its prediction
// changes: the multiple lies between 1 and the factor and only its direction tells.
bool find_boundary(Deviations& d, const ParameterMeasure& matrix, const std::map<std::int64_t, Use>& uses,
                   const std::map<std::int64_t, double>& rows) {
  Multiples first, later;
  for (const auto& [token, multiple] : rows) {
    const Use& use = uses.at(token);
    if (use.first && !use.later) first.values.push_back(multiple);
    if (use.later && !use.first) later.values.push_back(multiple);
  }
  if (!later.is(1, kTolerance / 4) || !first.known() || first.is(1, kTolerance / 2)) return false;
  const bool tied = is_embedding(matrix);
  const bool twice = first.is(2) || (tied && first.median() > 1), never = first.is(0) || (tied && first.median() < 1);
  d.add(twice   ? "double_counted_boundary_token"
        : never ? "missing_boundary_token"
                : "wrong_boundary_token",
        fmt::format(
            "{}: rows of first response tokens are {:.2f} times the reference's, rows of later ones {:.2f} times: the position of "
            "the last prompt token, which predicts the first response token, counts {}",
            matrix.name, first.median(), later.median(),
            twice   ? "more than once"
            : never ? "too little or not at all"
                    : "wrongly"),
        open_names(d));
  return true;
}

bool find_member(Deviations& d, const std::string& matrix, const Responses& responses, const std::map<std::int64_t, Use>& uses,
                 const std::map<std::int64_t, double>& rows) {
  std::vector<Multiples> own(responses.size());
  for (const auto& [token, multiple] : rows) {
    const auto& of = uses.at(token).responses;
    if (of.size() == 1) own[*of.begin()].values.push_back(multiple);
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
                      name(off[0]), own[off[0]].median()),
          open_names(d));
    return true;
  }
  if (off.size() != 2 || responses[off[0]].group != responses[off[1]].group) return false;
  const double ratio = responses[off[1]].advantage / responses[off[0]].advantage;
  if (!own[off[0]].is(ratio) || !own[off[1]].is(1 / ratio)) return false;
  d.add("swapped_members",
        fmt::format("{}: rows of tokens that only {} or {} has are {:.2f} and {:.2f} times the reference's: they have each other's "
                    "advantage",
                    matrix, name(off[0]), name(off[1]), own[off[0]].median(), own[off[1]].median()),
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
  const auto rows = row_multiples(d, *matrix, uses);
  // Members first: the few first tokens of one member can sway those of all, while one first token hardly sways its member's.
  if (!find_member(d, matrix->name, responses, uses, rows)) find_boundary(d, *matrix, uses, rows);
}

}  // namespace longstraw::compare
