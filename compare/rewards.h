#pragma once
// Whether one way of training earns the same rewards as another, from the records of several seeds a side (A: the way taken
// as right, B: the cheaper one). A seed is one sample: everything inside a run hangs together.
//
// What is compared is the mean reward of each run's last evaluation (or, without any, of its last training steps), paired by
// seed where both sides have the same seeds, at the last step that all runs have. Equivalence is two one-sided t tests at a
// margin (Schuirmann 1987); a margin relative to A's mean tests B against A times 1 - margin and 1 + margin (Hauschke et al.
// 1999), so that the mean's own error counts. Difference is a two-sided t test, and an estimate beyond the margin. Neither:
// undecided, with the seeds that would probably decide. docs/comparator.md gives rules, edges and measured error rates.
//
//   RewardReport report = compare_rewards(a_paths, b_paths, policy);
//   report.verdict                       // equivalent | different | undecided
//
// FormatError for a record without rewards or of an interrupted run, two runs of one seed or two arms on a side, sides that
// trained on other data or from other weights or were evaluated on other prompts. ConfigError for a policy out of range.

#include "core/base/errors.h"
#include "core/config/enums.h"

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace longstraw::compare {

enum class RewardVerdict { kEquivalent, kDifferent, kUndecided };
constexpr auto names_of(RewardVerdict) {
  using core::config::EnumName;
  return std::array{EnumName{RewardVerdict::kEquivalent, "equivalent"}, EnumName{RewardVerdict::kDifferent, "different"},
                    EnumName{RewardVerdict::kUndecided, "undecided"}};
}

struct RewardPolicy {
  double margin = 0.05;                   // of |mean of A|
  std::optional<double> absolute_margin;  // in units of reward, instead
  double level = 0.05;                    // of each test
  double tail_share = 0.1;                // of training steps that count, where there is no evaluation
  std::optional<std::int64_t> step_from;  // all evaluations (or training steps) from this one on count, instead
  std::int64_t resamples = 10000;         // of the bootstrap
  std::uint64_t seed = 0;
  bool accept_unclosed = false;
};

struct Interval {
  double low = 0.0, high = 0.0;
};

// Mean reward over the seeds at one step (of training: over the steps since the point before), with intervals by a bootstrap
// over seeds at 1 - 2·level.
struct CurvePoint {
  std::int64_t step = 0;
  double mean_a = 0.0, mean_b = 0.0;
  Interval a, b, difference;
};

// A run each, in the order of the seeds, and B - A with its t interval at 1 - 2·level.
struct MeanComparison {
  std::vector<double> a, b;
  double mean_a = 0.0, mean_b = 0.0;
  Interval difference;
  double p_different = 1.0;
};

// With one run on a side what would need a spread is NaN.
struct RewardReport {
  RewardPolicy policy;
  std::vector<std::string> a, b;  // paths, in the order of the seeds
  std::string arm_a, arm_b;
  std::vector<std::int64_t> seeds_a, seeds_b;
  bool paired = false;
  std::string measured_on;                     // eval | train
  std::int64_t first_step = 0, last_step = 0;  // that are measured
  std::vector<double> final_a, final_b;        // a run each
  double mean_a = 0.0, mean_b = 0.0;
  Interval difference;                     // of means, B - A, at 1 - 2·level, by t
  Interval difference_bootstrap;           // the same by resampling seeds
  double margin = 0.0;                     // in units of reward
  double t = 0.0, degrees = 0.0;           // of the test for a difference
  double p_different = 1.0;                // two-sided t
  double p_lower = 1.0, p_upper = 1.0;     // that B is not worse, and not better, by the margin
  double p_equivalent = 1.0;               // the larger of them
  double effect_size = 0.0;                // Hedges' g (paired: of the differences)
  double ks_statistic = 0.0, ks_p = 1.0;   // rewards of the held-out set, seeds together; p by permuting runs
  std::optional<std::int64_t> more_seeds;  // a side; none: decided, or out of reach (one seed, at the margin, ...)
  std::vector<CurvePoint> train_curve, eval_curve;
  std::optional<MeanComparison> whole_training;  // mean over all training steps: how fast, not how far; decides nothing
  std::vector<std::string> notes;
  RewardVerdict verdict = RewardVerdict::kUndecided;

  ExitStatus exit_status() const;  // 0 equivalent, 1 different or undecided
};

RewardReport compare_rewards(const std::vector<std::string>& a, const std::vector<std::string>& b, const RewardPolicy& policy);

std::string reward_report_text(const RewardReport& report);
nlohmann::json reward_report_json(const RewardReport& report);

}  // namespace longstraw::compare
