#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "compare/report.h"

namespace longstraw::compare {
namespace {

constexpr std::size_t kNameColumns = 44;
constexpr std::size_t kColumns = 100;

// Keeps the end of a long name: it is what tells parameters apart.
std::string shortened(const std::string& name) {
  if (name.size() <= kNameColumns) return name;
  return fmt::format("...{}", name.substr(name.size() - kNameColumns + 3));
}

std::string facts_text(const char* role, const RecordFacts& facts) {
  return fmt::format("{:<10} {} ({}, {}, {}{})\n", role, facts.path, facts.header.arm, facts.header.dtype, facts.header.device,
                     facts.closed ? "" : ", interrupted");
}

std::string whole_text(const StepReport& step) {
  const auto& s = step.measure.whole;
  std::string text = fmt::format("  {} parameters, {} elements; |reference| {:.6e}\n", step.measure.parameters.size(), s.elements,
                                 s.reference_norm());
  if (s.estimated) text += "  estimated from sketches where a gradient is absent; '-' is not known\n";
  if (!s.estimated) {
    text += fmt::format("  |error| quantiles: 50 % {:.2e}   90 % {:.2e}   99 % {:.2e}   largest {:.2e}\n", s.error_quantile(0.5),
                        s.error_quantile(0.9), s.error_quantile(0.99), s.error_quantile(1));
    if (s.max_error_index >= 0 && s.max_error > 0)
      text += fmt::format("  the largest at {}[{}]\n", s.max_error_parameter, s.max_error_index);
  }
  if (s.reference_nonfinite + s.candidate_nonfinite > 0) {
    text += fmt::format("  non-finite values: reference {}, candidate {}, on one side only {}\n", s.reference_nonfinite,
                        s.candidate_nonfinite, s.unmatched_nonfinite);
  }
  return text;
}

std::string structure_text(const StepMeasure& measure) {
  std::string text;
  for (const auto& name : measure.only_in_reference) text += fmt::format("  only in the reference: {}\n", name);
  for (const auto& name : measure.only_in_candidate) text += fmt::format("  only in the candidate: {}\n", name);
  for (const auto& s : measure.shapes) {
    text += fmt::format("  {}: shape [{}], expected [{}]\n", s.name, fmt::join(s.candidate, ", "), fmt::join(s.reference, ", "));
  }
  return text;
}

std::string parameters_text(const StepReport& step, bool all) {
  std::vector<const ParameterMeasure*> sorted;
  for (const auto& p : step.measure.parameters) sorted.push_back(&p);
  if (!all) {
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const auto* a, const auto* b) { return a->statistics.relative_l2() > b->statistics.relative_l2(); });
    sorted.resize(std::min<std::size_t>(sorted.size(), 5));
  }
  std::string text = statistics_header(all ? "parameter" : "worst parameters");
  for (const auto* p : sorted) text += statistics_row(p->name, p->statistics, step.judgement.noise_floor);
  return text;
}

std::string step_text(const StepReport& step, const TextOptions& options) {
  const auto& floor = step.judgement.noise_floor;
  std::string text = fmt::format("\nstep {}\n", step.measure.step) + whole_text(step) + structure_text(step.measure);
  text += fmt::format("\n{}{}", statistics_header("all"), statistics_row("whole model", step.measure.whole, floor));
  text += fmt::format("\n{}", statistics_header("kind"));
  for (const auto& [kind, s] : step.measure.by_kind) text += statistics_row(kind, s, floor);
  if (!step.measure.by_layer.empty()) text += fmt::format("\n{}", statistics_header("layer"));
  for (const auto& [layer, s] : step.measure.by_layer) text += statistics_row(fmt::format("layer {}", layer), s, floor);
  text += fmt::format("\n{}", parameters_text(step, options.all_parameters));
  text += fmt::format("\n{}", checks_text(step.judgement));
  if (!step.findings.empty()) text += fmt::format("\n{}", findings_text(step.findings));
  return text;
}

}  // namespace

std::string wrapped(const std::string& text, std::size_t indent) {
  std::string out(indent, ' ');
  std::size_t column = indent;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if (column > indent && column + 1 + word.size() > kColumns) {
      out += '\n';
      out.append(indent, ' ');
      column = indent;
    } else if (column > indent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
    begin = end + 1;
  }
  return out + "\n";
}

std::string statistics_header(const std::string& title) {
  return fmt::format("{:<{}} {:>9} {:>9} {:>9} {:>7} {:>7} {:>8}\n", title, kNameColumns, "cosine", "rel. L2", "ratio", "sign",
                     "update", "x noise");
}

std::string statistics_row(const std::string& name, const PairStatistics& s, const std::optional<double>& noise_floor) {
  const auto known = [&](double value) { return s.estimated ? std::string("-") : fmt::format("{:.4f}", value); };
  const std::string multiple =
      noise_floor && *noise_floor > 0 ? fmt::format("{:.3g}", s.relative_l2() / *noise_floor) : std::string("-");
  return fmt::format("{:<{}} {:>9.6f} {:>9.2e} {:>9.6f} {:>7} {:>7} {:>8}\n", shortened(name), kNameColumns, s.cosine(),
                     s.relative_l2(), s.norm_ratio(), known(s.sign_agreement()), known(s.update_cosine()), multiple);
}

std::string checks_text(const Judgement& judgement) {
  std::string text = "checks\n";
  for (const auto& c : judgement.checks) {
    text += fmt::format("  {:<4} {:<55} {:>11.4g} <= {:<11.4g}\n", c.pass ? "ok" : "FAIL", c.what, c.measured, c.bound);
    text += wrapped(c.parameter.empty() ? c.reason : fmt::format("{}: {}", c.parameter, c.reason), 7);
  }
  return text;
}

std::string findings_text(const std::vector<Finding>& findings) {
  std::string text = "likely causes\n";
  for (const auto& f : findings) text += fmt::format("  {}\n", f.name) + wrapped(f.evidence, 4);
  return text;
}

std::string report_text(const Report& report, const TextOptions& options) {
  std::string text = facts_text("reference", report.reference) + facts_text("candidate", report.candidate);
  if (report.noise) text += fmt::format("{:<10} {}\n", "noise", *report.noise);
  for (const auto& step : report.steps) text += step_text(step, options);
  if (!report.steps_only_in_reference.empty()) {
    text += fmt::format("\nsteps only in the reference: {}\n", fmt::join(report.steps_only_in_reference, ", "));
  }
  if (!report.steps_only_in_candidate.empty()) {
    text += fmt::format("\nsteps only in the candidate: {}\n", fmt::join(report.steps_only_in_candidate, ", "));
  }
  return text + fmt::format("\nverdict: {}\n", report.pass() ? "within bounds" : "beyond bounds");
}

}  // namespace longstraw::compare
