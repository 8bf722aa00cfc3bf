#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "compare/report.h"
#include "compare/rewards.h"

namespace longstraw::compare {
namespace {

constexpr std::size_t kCurveLines = 10;
constexpr std::size_t kPlotColumns = 40;

std::string number(double value) {
  if (std::isnan(value)) return "-";
  return fmt::format("{:.4f}", value);
}

std::string p_value(double p) {
  if (std::isnan(p)) return "not known";
  if (p > 0 && p < 1e-4) return fmt::format("{:.0e}", p);
  return fmt::format("{:.4f}", p);
}

std::string range(const Interval& interval) {
  if (std::isnan(interval.low)) return "not known";
  return fmt::format("{:.4f} to {:.4f}", interval.low, interval.high);
}

std::string percent(double part, double of) { return of == 0 ? "" : fmt::format(" ({:+.1f} % of A's)", 100 * part / std::abs(of)); }

std::string margin_words(const RewardReport& r) {
  if (r.policy.absolute_margin) return fmt::format("{:.4f}", r.margin);
  return fmt::format("{:.4f}, {:g} % of A's mean", r.margin, 100 * r.policy.margin);
}

std::string sides_text(const RewardReport& r) {
  const auto side = [](const char* name, const std::string& arm, const std::vector<std::int64_t>& seeds) {
    return fmt::format("{}  {:<10} {} run{}, seed{} {}\n", name, arm, seeds.size(), seeds.size() == 1 ? "" : "s",
                       seeds.size() == 1 ? "" : "s", fmt::join(seeds, " "));
  };
  const std::string steps =
      r.first_step == r.last_step ? fmt::format("step {}", r.last_step) : fmt::format("steps {} to {}", r.first_step, r.last_step);
  return side("A", r.arm_a, r.seeds_a) + side("B", r.arm_b, r.seeds_b) +
         fmt::format("mean reward of {}, {}; runs {}\n", r.measured_on == "eval" ? "the held-out set" : "training", steps,
                     r.paired ? "paired by seed" : "not paired");
}

std::string seeds_text(const RewardReport& r) {
  std::string text = fmt::format("\n{:<12}{:>10}{:>10}{:>10}\n", "seed", "A", "B", "B - A");
  const auto line = [&](const std::string& name, double a, double b) {
    text += fmt::format("{:<12}{:>10}{:>10}{:>10}\n", name, number(a), number(b), number(b - a));
  };
  if (r.paired) {
    for (std::size_t i = 0; i < r.final_a.size(); ++i) line(std::to_string(r.seeds_a[i]), r.final_a[i], r.final_b[i]);
  } else {
    const double none = std::nan("");
    for (std::size_t i = 0; i < r.final_a.size(); ++i) line(std::to_string(r.seeds_a[i]), r.final_a[i], none);
    for (std::size_t i = 0; i < r.final_b.size(); ++i) line(std::to_string(r.seeds_b[i]), none, r.final_b[i]);
  }
  line("mean", r.mean_a, r.mean_b);
  return text;
}

std::string tests_text(const RewardReport& r) {
  const int confidence = static_cast<int>(std::lround(100 * (1 - 2 * r.policy.level)));
  const double difference = r.mean_b - r.mean_a;
  std::string text = "\n";
  const auto line = [&](const char* name, const std::string& what) { text += fmt::format("{:<16}{}\n", name, what); };
  line("difference", number(difference) + percent(difference, r.mean_a));
  line("", fmt::format("{} % interval {} (t), {} (bootstrap)", confidence, range(r.difference), range(r.difference_bootstrap)));
  line("margin", margin_words(r));
  line("equal?", std::isnan(r.t)
                     ? "not known"
                     : fmt::format("p {} (two-sided t {:.2f}, {:.1f} degrees of freedom)", p_value(r.p_different), r.t, r.degrees));
  line("equivalent?",
       fmt::format("p {} that B is worse by the margin, p {} that it is better by it", p_value(r.p_lower), p_value(r.p_upper)));
  line("effect size", std::isnan(r.effect_size) ? "-" : fmt::format("{:.2f} standard deviations (Hedges' g)", r.effect_size));
  if (r.measured_on == "eval") {
    line("distribution", fmt::format("Kolmogorov-Smirnov distance {:.3f} on the held-out set, p {} (by permuting runs)",
                                     r.ks_statistic, p_value(r.ks_p)));
  }
  if (r.whole_training) {
    const auto& w = *r.whole_training;
    line("whole training",
         fmt::format("A {}, B {}, difference {} ({} % interval {}), p {}; decides nothing", number(w.mean_a), number(w.mean_b),
                     number(w.mean_b - w.mean_a), confidence, range(w.difference), p_value(w.p_different)));
  }
  return text;
}

// A line of a plot turned on its side: A and B at their means over the interval's dashes, * where they meet.
std::string plot_line(const CurvePoint& p, double low, double high) {
  std::string line(kPlotColumns, ' ');
  const auto column = [&](double value) {
    const double share = high > low ? (value - low) / (high - low) : 0;
    return static_cast<std::size_t>(std::lround(std::clamp(share, 0.0, 1.0) * static_cast<double>(kPlotColumns - 1)));
  };
  for (const auto* interval : {&p.a, &p.b}) {
    if (std::isnan(interval->low)) continue;
    for (std::size_t i = column(interval->low); i <= column(interval->high); ++i) line[i] = '-';
  }
  line[column(p.mean_b)] = 'B';
  line[column(p.mean_a)] = column(p.mean_a) == column(p.mean_b) ? '*' : 'A';
  return line;
}

std::string curve_text(const char* title, const std::vector<CurvePoint>& curve) {
  if (curve.size() < 2) return "";
  std::vector<CurvePoint> shown;
  const std::size_t lines = std::min(kCurveLines, curve.size());
  for (std::size_t i = 1; i <= lines; ++i) shown.push_back(curve[i * curve.size() / lines - 1]);
  double low = shown.front().mean_a, high = low;
  for (const auto& p : shown) {
    for (const double v : {p.mean_a, p.mean_b, p.a.low, p.a.high, p.b.low, p.b.high}) {
      if (std::isnan(v)) continue;
      low = std::min(low, v);
      high = std::max(high, v);
    }
  }
  const std::string scale_low = number(low), scale_high = number(high);
  std::string text = fmt::format("\n{:<12}{:>10}{:>10}{:>10}  |{}{:>{}}|\n", title, "A", "B", "B - A", scale_low, scale_high,
                                 kPlotColumns - scale_low.size());
  for (const auto& p : shown) {
    text += fmt::format("{:<12}{:>10}{:>10}{:>10}  |{}|\n", p.step, number(p.mean_a), number(p.mean_b), number(p.mean_b - p.mean_a),
                        plot_line(p, low, high));
  }
  return text;
}

std::string verdict_text(const RewardReport& r) {
  const std::string interval = fmt::format("{:.4f} to {:.4f}", r.difference.low, r.difference.high);
  const double difference = r.mean_b - r.mean_a;
  switch (r.verdict) {
    case RewardVerdict::kEquivalent:
      return fmt::format("equivalent: {} earns what {} does, within {}", r.arm_b, r.arm_a, margin_words(r));
    case RewardVerdict::kDifferent:
      return fmt::format("different: {} earns {:.4f} {} than {}, beyond {}", r.arm_b, std::abs(difference),
                         difference < 0 ? "less" : "more", r.arm_a, margin_words(r));
    case RewardVerdict::kUndecided: break;
  }
  if (std::isnan(r.difference.low)) return "undecided: one run a side";
  const std::string more =
      r.more_seeds
          ? fmt::format("; {} more seeds a side would decide with probability 0.8, if means and spreads stay", *r.more_seeds)
          : std::string("; more seeds can't be expected to decide");
  return fmt::format("undecided: the difference may be {}, the margin is {}{}", interval, margin_words(r), more);
}

}  // namespace

std::string reward_report_text(const RewardReport& r) {
  std::string text = sides_text(r) + seeds_text(r) + tests_text(r);
  text += curve_text("training", r.train_curve) + curve_text("evaluation", r.eval_curve);
  if (!r.notes.empty()) text += "\nnotes\n";
  for (const auto& note : r.notes) text += wrapped(note, 2);
  return text + fmt::format("\nverdict: {}\n", verdict_text(r));
}

}  // namespace longstraw::compare
