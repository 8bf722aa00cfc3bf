#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <tuple>

#include "compare/study.h"
#include "core/base/errors.h"

namespace longstraw::compare {

using core::record::StudyCell;
using core::record::StudyRow;
using core::record::StudyScope;

namespace {

struct Table {
  std::vector<std::string> titles;
  std::vector<bool> numeric;  // aligned to the right
  std::vector<std::vector<std::string>> lines;
};

std::string number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  // A deviation of rounding size must not print as none.
  if (value != 0 && std::abs(value) < 1e-3) return fmt::format("{:.1e}", value);
  return fmt::format("{:.4f}", value);
}

struct Measure {
  const char* title;
  double StudyRow::*member;
};
constexpr std::array kMeasures{Measure{"cosine", &StudyRow::cosine}, Measure{"relative L2", &StudyRow::relative_l2},
                               Measure{"norm ratio", &StudyRow::norm_ratio}, Measure{"update cosine", &StudyRow::update_cosine},
                               Measure{"sign cosine", &StudyRow::sign_cosine}};

void add_measures(Table& table) {
  for (const auto& m : kMeasures) {
    table.titles.emplace_back(m.title);
    table.numeric.push_back(true);
  }
}

void add_measures(std::vector<std::string>& line, const StudyRow& row) {
  for (const auto& m : kMeasures) line.push_back(number(row.*m.member));
}

std::string padded(const std::string& text, std::size_t width, bool right) {
  return right ? fmt::format("{:>{}}", text, width) : fmt::format("{:<{}}", text, width);
}

std::string print(const Table& table, TableStyle style) {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < table.titles.size(); ++c) {
    widths.push_back(table.titles[c].size());
    for (const auto& line : table.lines) widths[c] = std::max(widths[c], line[c].size());
  }
  const bool markdown = style == TableStyle::kMarkdown;
  std::string text;
  const auto add = [&](const std::vector<std::string>& line) {
    std::string one = markdown ? "|" : "";
    for (std::size_t c = 0; c < line.size(); ++c) {
      const auto cell = padded(line[c], widths[c], table.numeric[c]);
      one += markdown ? " " + cell + " |" : (c == 0 ? "" : "  ") + cell;
    }
    one.erase(one.find_last_not_of(' ') + 1);
    text += one + "\n";
  };
  add(table.titles);
  if (markdown) {
    text += "|";
    for (std::size_t c = 0; c < widths.size(); ++c) {
      text += table.numeric[c] ? std::string(widths[c] + 1, '-') + ":|" : std::string(widths[c] + 2, '-') + "|";
    }
    text += "\n";
  }
  for (const auto& line : table.lines) add(line);
  return text;
}

// Tails of one batch stand together, from the shortest: what is compared is read downwards.
auto in_order(const core::record::StudyKey& k) {
  return std::tie(k.family, k.model, k.dtype, k.prompt_tokens, k.group_size, k.response_tokens, k.seed, k.tail_tokens, k.arm);
}

struct Coordinate {
  const char* title;
  bool numeric;
  std::function<std::string(const core::record::StudyKey&)> get;
};

const std::vector<Coordinate>& coordinates() {
  using core::record::StudyKey;
  static const std::vector<Coordinate> all{
      {"family", false, [](const StudyKey& k) { return k.family; }},
      {"model", false, [](const StudyKey& k) { return k.model; }},
      {"dtype", false, [](const StudyKey& k) { return k.dtype; }},
      {"prompt", true, [](const StudyKey& k) { return std::to_string(k.prompt_tokens); }},
      {"group", true, [](const StudyKey& k) { return std::to_string(k.group_size); }},
      {"response", true, [](const StudyKey& k) { return std::to_string(k.response_tokens); }},
      {"seed", true, [](const StudyKey& k) { return std::to_string(k.seed); }},
      {"tail", true, [](const StudyKey& k) { return std::to_string(k.tail_tokens); }},
      {"arm", false, [](const StudyKey& k) { return k.arm; }},
  };
  return all;
}

}  // namespace

std::string study_table(std::vector<StudyCell> cells, TableStyle style) {
  if (cells.empty()) return "no cells\n";
  std::sort(cells.begin(), cells.end(), [](const auto& a, const auto& b) { return in_order(a.key) < in_order(b.key); });
  Table table;
  std::vector<const Coordinate*> shown;
  std::string said;
  for (const auto& c : coordinates()) {
    const std::string first = c.get(cells.front().key);
    const bool same = std::all_of(cells.begin(), cells.end(), [&](const auto& cell) { return c.get(cell.key) == first; });
    if (same && cells.size() > 1) {
      said += fmt::format("{}{} {}", said.empty() ? "" : ", ", c.title, first);
      continue;
    }
    shown.push_back(&c);
    table.titles.emplace_back(c.title);
    table.numeric.push_back(c.numeric);
  }
  add_measures(table);
  for (const auto& cell : cells) {
    std::vector<std::string> line;
    for (const auto* c : shown) line.push_back(c->get(cell.key));
    const auto* whole = core::record::find_row(cell, StudyScope::kWhole);
    if (whole == nullptr) throw ConfigError(fmt::format("study: cell {}: no row of the whole model", describe(cell.key)));
    add_measures(line, *whole);
    table.lines.push_back(std::move(line));
  }
  return (said.empty() ? "" : said + "\n\n") + print(table, style);
}

std::string study_breakdown(const StudyCell& cell, StudyScope scope, TableStyle style) {
  if (scope != StudyScope::kLayer && scope != StudyScope::kKind) {
    throw ConfigError(fmt::format("study: no breakdown by {}, expected layer or kind", scope_name(scope)));
  }
  const bool by_layer = scope == StudyScope::kLayer;
  Table table{.titles = {by_layer ? "layer" : "kind", "lost share"}, .numeric = {by_layer, true}, .lines = {}};
  add_measures(table);
  const auto* whole = core::record::find_row(cell, StudyScope::kWhole);
  for (const auto& row : cell.rows) {
    if (row.scope != scope) continue;
    // Of the squared norm of all that is lost: sums to one over the kinds.
    const double lost = whole == nullptr ? 0 : whole->difference_norm;
    const double share = lost > 0 ? row.difference_norm * row.difference_norm / (lost * lost) : 0;
    std::vector<std::string> line{by_layer ? std::to_string(row.layer) : row.kind, number(share)};
    add_measures(line, row);
    table.lines.push_back(std::move(line));
  }
  return print(table, style);
}

}  // namespace longstraw::compare
