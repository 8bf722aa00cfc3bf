#pragma once
// Whether one way of training earns the same rewards as another, from the records of several seeds a side (A: the way taken
// as right, B: the cheaper one). A seed is one sample: everything inside a run hangs together.
//
// What is compared is the mean reward of each run's last evaluations (or, without any, of its last training steps), paired by
// seed where both sides have the same seeds. Equivalence is two one-sided t tests at a margin, a share of A's mean (Schuirmann
// 1987); difference is a two-sided test. Neither: undecided, with the seeds that would probably decide.
//
//   RewardReport report = compare_rewards(a_paths, b_paths, options);
//   report.verdict                       // equivalent | different | undecided
//
// FormatError for a record without rewards, two runs of one seed on a side, sides that trained on other data or from other weights.

#include "core/base/errors.h"
#include "core/config/enums.h"

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
  std::int64_t resamples = 10000;         // of the bootstrap
  std::uint64_t seed = 0;
  bool accept_unclosed = false;
};

struct Interval {
  double low = 0.0, high = 0.0;
};

// Mean reward over the seeds at one step, with a bootstrap interval over seeds.
struct CurvePoint {
  std::int64_t step = 0;
  double mean_a = 0.0, mean_b = 0.0;
  Interval a, b, difference;
};

struct RewardReport {
  std::vector<std::string> a, b;  // paths
  std::string arm_a, arm_b;
  bool paired = false;
  std::string measured_on;               // eval | train
  std::vector<double> final_a, final_b;  // a run each, in the order of the seeds
  double mean_a = 0.0, mean_b = 0.0;
  Interval difference;                     // of means, B - A, at 1 - 2·level
  double margin = 0.0;                     // in units of reward
  double p_different = 1.0;                // two-sided t
  double p_equivalent = 1.0;               // the larger of the two one-sided
  double effect_size = 0.0;                // Hedges' g (paired: of the differences)
  double ks_statistic = 0.0, ks_p = 1.0;   // rewards of the held-out set, last evaluation, seeds together
  std::optional<std::int64_t> more_seeds;  // a side; none: decided, or out of reach (equal means without a spread, ...)
  std::vector<CurvePoint> train_curve, eval_curve;
  std::vector<std::string> notes;
  RewardVerdict verdict = RewardVerdict::kUndecided;

  ExitStatus exit_status() const;  // 0 equivalent, 1 different or undecided
};

RewardReport compare_rewards(const std::vector<std::string>& a, const std::vector<std::string>& b, const RewardPolicy& policy);

std::string reward_report_text(const RewardReport& report);
nlohmann::json reward_report_json(const RewardReport& report);

}  // namespace longstraw::compare
