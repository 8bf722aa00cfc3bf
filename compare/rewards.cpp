#include "compare/rewards.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "compare/rewards_read.h"
#include "compare/rewards_statistics.h"

namespace longstraw::compare {
namespace {

using Runs = std::vector<RewardRun>;

constexpr std::size_t kCurvePoints = 100;

void require_policy(const RewardPolicy& p) {
  const auto require = [](bool right, const char* option, double got, const char* wanted) {
    if (!right) throw ConfigError(fmt::format("{}: got {}, wanted {}", option, got, wanted));
  };
  require(p.margin > 0 && p.margin < 1, "--margin", p.margin, "a share above 0 and below 1");
  require(!p.absolute_margin || (*p.absolute_margin > 0 && std::isfinite(*p.absolute_margin)), "--absolute-margin",
          p.absolute_margin.value_or(0), "a reward above 0");
  require(p.level > 0 && p.level < 0.5, "--level", p.level, "a probability above 0 and below 0.5");
  require(p.tail_share > 0 && p.tail_share <= 1, "--tail-share", p.tail_share, "a share above 0 and up to 1");
  require(p.resamples >= 100, "--resamples", static_cast<double>(p.resamples), "100 at least");
}

template <class Value>
std::vector<std::int64_t> steps_of(const std::map<std::int64_t, Value>& by_step) {
  std::vector<std::int64_t> steps;
  for (const auto& [step, value] : by_step) steps.push_back(step);
  return steps;
}

// Steps that all runs have, rising: only the same amount of training is compared.
std::vector<std::int64_t> common_steps(const Runs& a, const Runs& b,
                                       const std::function<std::vector<std::int64_t>(const RewardRun&)>& of) {
  std::vector<std::int64_t> common = of(a.front());
  for (const auto* runs : {&a, &b}) {
    for (const auto& run : *runs) {
      const auto own = of(run);
      std::vector<std::int64_t> both;
      std::set_intersection(common.begin(), common.end(), own.begin(), own.end(), std::back_inserter(both));
      common = std::move(both);
    }
  }
  return common;
}

using Steps = std::span<const std::int64_t>;
using MeanOf = double (*)(const RewardRun&, Steps);

double train_mean(const RewardRun& run, Steps steps) {
  RewardSum all;
  for (const auto step : steps) {
    all.sum += run.train.at(step).sum;
    all.count += run.train.at(step).count;
  }
  return all.mean();
}

double eval_mean(const RewardRun& run, Steps steps) {
  RewardSum all;
  for (const auto step : steps) {
    for (const auto& row : run.evals.at(step)) all.sum += *row.reward;
    all.count += static_cast<std::int64_t>(run.evals.at(step).size());
  }
  return all.mean();
}

std::vector<double> means(const Runs& runs, Steps steps, MeanOf mean) {
  std::vector<double> result;
  for (const auto& run : runs) result.push_back(mean(run, steps));
  return result;
}

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

// At most kCurvePoints points, each over the steps since the last.
std::vector<CurvePoint> curve(const Runs& a, const Runs& b, Steps steps, MeanOf mean, const Bootstrap& bootstrap,
                              double confidence) {
  std::vector<CurvePoint> points;
  const std::size_t count = std::min(kCurvePoints, steps.size());
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t begin = i * steps.size() / count, end = (i + 1) * steps.size() / count;
    const Steps window = steps.subspan(begin, end - begin);
    const auto of_a = means(a, window, mean), of_b = means(b, window, mean);
    const auto intervals = bootstrap.intervals(of_a, of_b, confidence);
    points.push_back({.step = window.back(),
                      .mean_a = mean_of(of_a),
                      .mean_b = mean_of(of_b),
                      .a = intervals.a,
                      .b = intervals.b,
                      .difference = intervals.difference});
  }
  return points;
}

// The steps that decide: the last evaluation, the last share of training, or what --step-from says.
std::vector<std::int64_t> measured_steps(const std::vector<std::int64_t>& common, bool eval, const RewardPolicy& policy) {
  if (policy.step_from) {
    std::vector<std::int64_t> steps;
    std::copy_if(common.begin(), common.end(), std::back_inserter(steps), [&](auto step) { return step >= *policy.step_from; });
    if (steps.empty()) {
      throw ConfigError(fmt::format("--step-from: got {}, wanted at most {}, the last step that all runs have", *policy.step_from,
                                    common.back()));
    }
    return steps;
  }
  const auto all = static_cast<double>(common.size());
  const auto count = eval ? std::ptrdiff_t{1} : static_cast<std::ptrdiff_t>(std::ceil(policy.tail_share * all));
  return {common.end() - count, common.end()};
}

std::vector<std::vector<double>> rewards_at(const Runs& runs, std::int64_t step) {
  std::vector<std::vector<double>> result;
  for (const auto& run : runs) {
    auto& rewards = result.emplace_back();
    for (const auto& row : run.evals.at(step)) rewards.push_back(*row.reward);
  }
  return result;
}

void note_the_runs(RewardReport& report, const Runs& a, const Runs& b, bool eval) {
  std::vector<std::string> longer, without, unclosed, incomplete;
  for (const auto* runs : {&a, &b}) {
    for (const auto& run : *runs) {
      const auto steps = eval ? steps_of(run.evals) : steps_of(run.train);
      if (!steps.empty() && steps.back() > report.last_step) longer.push_back(fmt::format("{} (to {})", run.path, steps.back()));
      if (run.evals.empty()) without.push_back(run.path);
      if (!run.closed) unclosed.push_back(run.path);
      if (run.missing > 0) incomplete.push_back(fmt::format("{} ({} of {})", run.path, run.missing, run.rows));
    }
  }
  const auto say = [&](const char* text, const std::vector<std::string>& which) {
    if (!which.empty()) report.notes.push_back(fmt::format("{}: {}", text, fmt::join(which, ", ")));
  };
  say("runs that went on after the last step that all have", longer);
  if (without.size() < a.size() + b.size()) say("without evaluations, so training rewards are compared", without);
  say("interrupted runs", unclosed);
  say("responses without a reward, left out", incomplete);
  for (const auto& setting : differing_settings(a, b)) {
    report.notes.push_back(fmt::format("the sides differ in a setting other than the arm: {}", setting));
  }
  if (!report.paired && report.seeds_a.size() + report.seeds_b.size() > 2) {
    report.notes.emplace_back("the sides do not have the same seeds, so runs are not paired (Welch's test)");
  }
}

void take_decision(RewardReport& report, const RewardDecision& decision) {
  report.mean_a = decision.mean_a;
  report.mean_b = decision.mean_b;
  report.difference = decision.difference;
  report.margin = decision.margin;
  report.t = decision.t;
  report.degrees = decision.degrees;
  report.p_different = decision.p_different;
  report.p_lower = decision.p_lower;
  report.p_upper = decision.p_upper;
  report.p_equivalent = std::max(decision.p_lower, decision.p_upper);
  report.effect_size = decision.effect_size;
  report.verdict = decision.verdict;
  report.notes = decision.notes;
}

RewardReport identified(const Runs& a, const Runs& b, const RewardPolicy& policy) {
  RewardReport report{.policy = policy, .arm_a = a.front().header.arm, .arm_b = b.front().header.arm};
  for (const auto& run : a) {
    report.a.push_back(run.path);
    report.seeds_a.push_back(run.header.seed);
  }
  for (const auto& run : b) {
    report.b.push_back(run.path);
    report.seeds_b.push_back(run.header.seed);
  }
  report.paired = report.seeds_a == report.seeds_b;
  return report;
}

}  // namespace

ExitStatus RewardReport::exit_status() const {
  return verdict == RewardVerdict::kEquivalent ? ExitStatus::kWithinBounds : ExitStatus::kBeyondBounds;
}

RewardReport compare_rewards(const std::vector<std::string>& a_paths, const std::vector<std::string>& b_paths,
                             const RewardPolicy& policy) {
  require_policy(policy);
  if (a_paths.empty() || b_paths.empty()) throw ConfigError("rewards: a side without records, wanted one at least on each");
  const Runs a = read_reward_side(a_paths, policy.accept_unclosed), b = read_reward_side(b_paths, policy.accept_unclosed);
  require_comparable(a, b);
  RewardReport report = identified(a, b, policy);

  const auto train = common_steps(a, b, [](const RewardRun& run) { return steps_of(run.train); });
  const auto evals = common_steps(a, b, [](const RewardRun& run) { return steps_of(run.evals); });
  if (train.empty() && evals.empty()) throw FormatError("rewards: the runs have no step in common, of training or evaluation");
  const bool eval = !evals.empty();
  report.measured_on = eval ? "eval" : "train";
  const auto measured = measured_steps(eval ? evals : train, eval, policy);
  report.first_step = measured.front();
  report.last_step = measured.back();
  const MeanOf mean = eval ? eval_mean : train_mean;
  report.final_a = means(a, measured, mean);
  report.final_b = means(b, measured, mean);
  const RewardDecision decision = decide(report.final_a, report.final_b, report.paired, policy);
  take_decision(report, decision);
  if (const auto seeds = seeds_to_decide(report.final_a, report.final_b, decision, policy)) {
    report.more_seeds = *seeds - static_cast<std::int64_t>(std::min(a.size(), b.size()));
  }

  const double confidence = 1 - 2 * policy.level;
  const Bootstrap bootstrap(a.size(), b.size(), report.paired, policy.resamples, policy.seed);
  report.difference_bootstrap = bootstrap.intervals(report.final_a, report.final_b, confidence).difference;
  report.train_curve = curve(a, b, train, train_mean, bootstrap, confidence);
  report.eval_curve = curve(a, b, evals, eval_mean, bootstrap, confidence);
  if (!train.empty()) {
    MeanComparison whole{.a = means(a, train, train_mean), .b = means(b, train, train_mean)};
    const auto decision = decide(whole.a, whole.b, report.paired, policy);
    whole.mean_a = decision.mean_a;
    whole.mean_b = decision.mean_b;
    whole.difference = decision.difference;
    whole.p_different = decision.p_different;
    report.whole_training = std::move(whole);
  }
  if (eval) {
    const auto ks = ks_over_runs(rewards_at(a, evals.back()), rewards_at(b, evals.back()), report.paired, policy.seed);
    report.ks_statistic = ks.statistic;
    report.ks_p = ks.p;
  }
  note_the_runs(report, a, b, eval);
  return report;
}

}  // namespace longstraw::compare
