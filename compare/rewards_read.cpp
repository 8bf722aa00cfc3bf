#include "compare/rewards_read.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "core/base/errors.h"
#include "core/record/reader.h"

namespace longstraw::compare {
namespace {

using Runs = std::vector<RewardRun>;

const RewardRun* with_seed(const Runs& runs, std::int64_t seed) {
  const auto found = std::find_if(runs.begin(), runs.end(), [&](const auto& run) { return run.header.seed == seed; });
  return found == runs.end() ? nullptr : &*found;
}

bool alike(const Runs& runs, std::string core::record::RecordHeader::*input) {
  return std::all_of(runs.begin(), runs.end(), [&](const auto& run) { return run.header.*input == runs.front().header.*input; });
}

void require_same_input(const Runs& a, const Runs& b, std::string core::record::RecordHeader::*input, const char* name,
                        const char* what) {
  const auto require = [&](const RewardRun& one, const RewardRun& other) {
    if (one.header.*input == other.header.*input) return;
    throw FormatError(
        fmt::format("{} and {}: {} {} and {}: they {}", one.path, other.path, name, one.header.*input, other.header.*input, what));
  };
  if (alike(a, input) && alike(b, input)) return require(a.front(), b.front());
  for (const auto& run : a) {
    if (const auto* other = with_seed(b, run.header.seed)) require(run, *other);
  }
}

void require_same_prompts(const RewardRun& one, const RewardRun& other) {
  if (one.evals.empty() || other.evals.empty()) return;
  const auto require_all = [](const RewardRun& in, const RewardRun& of) {
    for (const auto& prompt : of.eval_prompts) {
      if (in.eval_prompts.contains(prompt)) continue;
      throw FormatError(fmt::format("{}: no evaluation of prompt {}, which {} has: they were evaluated on other prompts", in.path,
                                    prompt, of.path));
    }
  };
  require_all(one, other);
  require_all(other, one);
}

using Settings = std::map<std::string, std::string>;

void flatten(const YAML::Node& node, const std::string& prefix, Settings& settings) {
  if (node.IsMap()) {
    for (const auto& entry : node) {
      const auto key = entry.first.as<std::string>();
      flatten(entry.second, prefix.empty() ? key : prefix + "." + key, settings);
    }
  } else {
    settings[prefix] = YAML::Dump(node);
  }
}

Settings settings_of(const RewardRun& run) {
  Settings settings;
  try {
    flatten(YAML::Load(run.header.config_yaml), "", settings);
  } catch (const YAML::Exception&) {
    return {};  // a record made by another program may say there what it likes
  }
  return settings;
}

// Keys on which all runs of a side agree. Absent reads as absent.
Settings common_settings(const Runs& runs) {
  Settings common = settings_of(runs.front());
  for (const auto& run : runs) {
    const Settings own = settings_of(run);
    std::erase_if(common, [&](const auto& entry) {
      const auto found = own.find(entry.first);
      return found == own.end() || found->second != entry.second;
    });
  }
  return common;
}

bool is_expected_to_differ(const std::string& key) {
  const std::string last = key.substr(key.rfind('.') + 1);
  return key == "train.arm" || last == "seed" || last == "output_dir" || last == "out" || last == "resume_from_checkpoint";
}

}  // namespace

RewardRun read_reward_run(const std::string& path, bool accept_unclosed) {
  const core::record::RecordReader reader(path);
  RewardRun run{.path = path, .header = reader.header(), .closed = reader.closed()};
  if (!run.closed && !accept_unclosed) {
    throw FormatError(fmt::format("{}: its run was interrupted; --partial compares what it has", path));
  }
  for (auto& row : reader.rewards()) {
    if (row.split != "train" && row.split != "eval") continue;
    ++run.rows;
    if (row.split == "eval") run.eval_prompts.insert(row.prompt_id);
    if (!row.reward) {
      ++run.missing;
      continue;
    }
    if (!std::isfinite(*row.reward)) {
      throw FormatError(fmt::format("{}: /rewards: step {}, prompt {}, member {}: reward {}, expected a finite one", path, row.step,
                                    row.prompt_id, row.member, *row.reward));
    }
    if (row.split == "train") {
      auto& sum = run.train[row.step];
      sum.sum += *row.reward;
      ++sum.count;
    } else {
      run.evals[row.step].push_back(std::move(row));
    }
  }
  if (run.train.empty() && run.evals.empty()) {
    throw FormatError(
        fmt::format("{}: /rewards: no reward of the splits train and eval; wanted the record of a training run", path));
  }
  return run;
}

std::vector<RewardRun> read_reward_side(const std::vector<std::string>& paths, bool accept_unclosed) {
  Runs runs;
  for (const auto& path : paths) {
    RewardRun run = read_reward_run(path, accept_unclosed);
    if (!runs.empty() && runs.front().header.arm != run.header.arm) {
      throw FormatError(fmt::format("{} and {}: arms {} and {} on one side, expected one", runs.front().path, path,
                                    runs.front().header.arm, run.header.arm));
    }
    if (const auto* other = with_seed(runs, run.header.seed)) {
      throw FormatError(fmt::format(
          "{} and {}: both of seed {} and arm {}; a side takes one run a seed. Two ways of training with one arm's name (two "
          "tails) are told apart by --a and --b",
          other->path, path, run.header.seed, run.header.arm));
    }
    runs.push_back(std::move(run));
  }
  std::sort(runs.begin(), runs.end(), [](const auto& x, const auto& y) { return x.header.seed < y.header.seed; });
  return runs;
}

void require_comparable(const Runs& a, const Runs& b) {
  require_same_input(a, b, &core::record::RecordHeader::model_sha256, "model_sha256", "did not begin with the same weights");
  require_same_input(a, b, &core::record::RecordHeader::data_sha256, "data_sha256", "were not trained on the same data");
  for (const auto* runs : {&a, &b}) {
    for (const auto& run : *runs) require_same_prompts(a.front(), run);
  }
}

std::vector<std::string> differing_settings(const Runs& a, const Runs& b) {
  const Settings of_a = common_settings(a), of_b = common_settings(b);
  std::vector<std::string> result;
  for (const auto& [key, value] : of_a) {
    const auto other = of_b.find(key);
    if (other == of_b.end() || other->second == value || is_expected_to_differ(key)) continue;
    result.push_back(fmt::format("{}: {} | {}", key, value, other->second));
  }
  return result;
}

}  // namespace longstraw::compare
