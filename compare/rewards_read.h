#pragma once
// The rewards of a run, from its record: sums by step of training, rows of evaluations.

#include "core/record/record.h"

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace longstraw::compare {

struct RewardSum {
  double sum = 0.0;
  std::int64_t count = 0;

  double mean() const { return sum / static_cast<double>(count); }
};

struct RewardRun {
  std::string path;
  core::record::RecordHeader header;
  bool closed = true;
  std::int64_t rows = 0, missing = 0;  // responses, and those without a reward
  std::set<std::string> eval_prompts;
  std::map<std::int64_t, RewardSum> train;                             // by step; steps without any reward are left out
  std::map<std::int64_t, std::vector<core::record::RewardRow>> evals;  // by step; rows with a reward
};

// FormatError: no record, interrupted (unless accepted), no rewards, an infinite reward.
RewardRun read_reward_run(const std::string& path, bool accept_unclosed);

// A side's runs in the order of their seeds. FormatError: two runs of one seed, two arms.
std::vector<RewardRun> read_reward_side(const std::vector<std::string>& paths, bool accept_unclosed);

// FormatError unless the sides trained on the same data from the same weights and were evaluated on the same prompts. Where
// each seed has weights or data of its own, that is asked of runs of the same seed.
void require_comparable(const std::vector<RewardRun>& a, const std::vector<RewardRun>& b);

// Settings in which all runs of a side agree and the sides don't, apart from the arm, seeds and file names:
// "optim.learning_rate: 1e-5 | 1e-6".
std::vector<std::string> differing_settings(const std::vector<RewardRun>& a, const std::vector<RewardRun>& b);

}  // namespace longstraw::compare
