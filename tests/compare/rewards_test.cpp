// The verdict on rewards from records: what is compared with what, by which test, what is refused, what is said.

#include "compare/rewards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/base/errors.h"
#include "core/record/writer.h"
#include "tests/record/sample_record.h"

namespace longstraw::compare {
namespace {

using core::record::RewardRow;
using core::record::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

using Values = std::vector<double>;

// The runs whose p values rewards_statistics_test.cpp takes from scipy.
const Values kA{0.71, 0.64, 0.80, 0.68, 0.75}, kC{0.31, 0.52, 0.44, 0.36};
constexpr double kClose = 1e-12;  // sums of a few numbers near 1

// --- From records.
struct SampleRun {
  std::string arm = "reference";
  std::int64_t seed = 1;
  std::string model = "weights", data = "prompts", config;
  bool closed = true;
  std::vector<RewardRow> rows;
};

std::vector<RewardRow> rows_at(std::int64_t step, const std::string& split, const Values& rewards) {
  std::vector<RewardRow> rows;
  for (std::size_t i = 0; i < rewards.size(); ++i) {
    rows.push_back({.step = step, .split = split, .prompt_id = "p" + std::to_string(i), .member = 0, .reward = rewards[i]});
  }
  return rows;
}

// Training whose reward rises from step 1 to 20, and evaluations at 10 and 20 that end at `reached`.
SampleRun learning(const std::string& arm, std::int64_t seed, double reached) {
  SampleRun run{.arm = arm, .seed = seed};
  const auto add = [&](std::vector<RewardRow> rows) { run.rows.insert(run.rows.end(), rows.begin(), rows.end()); };
  for (std::int64_t step = 1; step <= 20; ++step) {
    add(rows_at(step, "train", {reached * static_cast<double>(step) / 20, reached * static_cast<double>(step) / 20 - 0.01}));
    if (step % 10 == 0) add(rows_at(step, "eval", {reached * static_cast<double>(step) / 20 - 0.1, reached + 0.1}));
  }
  return run;
}

class Rewards : public ::testing::Test {
 protected:
  std::string write(const SampleRun& run) {
    const std::string path = folder_.file(std::to_string(written_++) + ".h5");
    core::record::RecordHeader header{.arm = run.arm,
                                      .config_yaml = run.config,
                                      .model_sha256 = run.model,
                                      .data_sha256 = run.data,
                                      .dtype = "float32",
                                      .device = "cpu",
                                      .seed = run.seed};
    core::record::RecordWriter writer(path, header, {.durable = false});
    writer.append_rewards(run.rows);
    if (run.closed) writer.close();
    return path;
  }
  std::vector<std::string> side(const std::string& arm, const Values& reached, std::int64_t first_seed = 1) {
    std::vector<std::string> paths;
    for (std::size_t i = 0; i < reached.size(); ++i) {
      paths.push_back(write(learning(arm, first_seed + static_cast<std::int64_t>(i), reached[i])));
    }
    return paths;
  }
  template <class Exception = FormatError>
  void expect_refused(const std::vector<std::string>& a, const std::vector<std::string>& b, const std::string& why,
                      const RewardPolicy& policy = {}) {
    try {
      compare_rewards(a, b, policy);
      ADD_FAILURE() << "accepted; expected: " << why;
    } catch (const Exception& error) {
      EXPECT_THAT(error.what(), HasSubstr(why));
    }
  }

  TemporaryFolder folder_;
  int written_ = 0;
};

TEST_F(Rewards, TheLastEvaluationDecidesPairedBySeed) {
  const Values b_reached{0.69, 0.66, 0.74, 0.65, 0.77};
  const auto a = side("reference", kA);
  auto b = side("exact", b_reached);
  std::swap(b[0], b[4]);  // the order of the files does not matter
  const auto report = compare_rewards(a, b, {});
  EXPECT_TRUE(report.paired);
  EXPECT_EQ(report.measured_on, "eval");
  EXPECT_EQ(report.last_step, 20);
  EXPECT_THAT(report.seeds_b, ElementsAre(1, 2, 3, 4, 5));
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(report.final_a[i], kA[i], kClose);
    EXPECT_NEAR(report.final_b[i], b_reached[i], kClose);
  }
  EXPECT_NEAR(report.p_different, 0.41367853187424564, 1e-9);
  EXPECT_EQ(report.verdict, RewardVerdict::kUndecided);
  EXPECT_TRUE(report.more_seeds.has_value());
  EXPECT_EQ(report.exit_status(), ExitStatus::kBeyondBounds);
  EXPECT_EQ(report.train_curve.size(), 20u);
  EXPECT_EQ(report.eval_curve.size(), 2u);
  EXPECT_NEAR(report.eval_curve[1].mean_a, report.mean_a, kClose);
  ASSERT_TRUE(report.whole_training);
  EXPECT_NEAR(report.whole_training->a[0], 0.71 * 10.5 / 20 - 0.005, kClose);
}

TEST_F(Rewards, OtherSeedsAreNotPaired) {
  const auto report = compare_rewards(side("reference", kA), side("detached", kC, 3), {});
  EXPECT_FALSE(report.paired);
  EXPECT_NEAR(report.p_different, 0.002160915453494928, 1e-9);
  EXPECT_EQ(report.verdict, RewardVerdict::kDifferent);
  EXPECT_EQ(report.more_seeds, std::nullopt);
  EXPECT_THAT(report.notes, ::testing::Contains(HasSubstr("not paired")));
}

TEST_F(Rewards, WithoutEvaluationsTheLastTrainingStepsDecide) {
  std::vector<std::string> a, b;
  for (std::int64_t seed = 1; seed <= 3; ++seed) {
    SampleRun run = learning("reference", seed, 0.8);
    if (seed > 1) std::erase_if(run.rows, [](const auto& row) { return row.split == "eval"; });
    a.push_back(write(run));
    run.arm = "exact";
    b.push_back(write(run));
  }
  const auto report = compare_rewards(a, b, {});
  EXPECT_EQ(report.measured_on, "train");
  EXPECT_EQ(report.first_step, 19);
  EXPECT_EQ(report.last_step, 20);
  EXPECT_NEAR(report.mean_a, 0.8 * 19.5 / 20 - 0.005, kClose);
  EXPECT_EQ(report.verdict, RewardVerdict::kEquivalent);
  EXPECT_THAT(report.notes, ::testing::Contains(HasSubstr("without evaluations")));
  EXPECT_EQ(compare_rewards(a, b, {.tail_share = 1.0}).first_step, 1);
  EXPECT_EQ(compare_rewards(a, b, {.step_from = 12}).first_step, 12);
  expect_refused<ConfigError>(a, b, "--step-from: got 21", {.step_from = 21});
}

TEST_F(Rewards, RunsOfUnequalLengthAreComparedWhereAllAre) {
  auto a = side("reference", {0.7, 0.8});
  SampleRun longer = learning("exact", 1, 0.7);
  for (const auto& row : rows_at(30, "eval", {0, 0})) longer.rows.push_back(row);
  const auto report = compare_rewards(a, {write(longer), write(learning("exact", 2, 0.8))}, {});
  EXPECT_EQ(report.last_step, 20);
  EXPECT_EQ(report.verdict, RewardVerdict::kEquivalent);
  EXPECT_THAT(report.notes, ::testing::Contains(HasSubstr("(to 30)")));
}

TEST_F(Rewards, ResponsesWithoutARewardAreLeftOutAndCounted) {
  SampleRun run = learning("reference", 1, 0.7);
  for (auto& row : run.rows) {
    if (row.split == "eval" && row.prompt_id == "p1") row.reward.reset();
  }
  const auto report = compare_rewards({write(run)}, {write(learning("exact", 1, 0.7))}, {});
  EXPECT_NEAR(report.final_a[0], 0.6, kClose);
  EXPECT_THAT(report.notes, ::testing::Contains(HasSubstr("(2 of 44)")));
}

TEST_F(Rewards, SettingsThatDifferBesidesTheArmAreNamed) {
  std::vector<std::string> a, b;
  for (std::int64_t seed = 1; seed <= 2; ++seed) {
    SampleRun run = learning("reference", seed, 0.7);
    run.config = "train: {arm: reference, seed: " + std::to_string(seed) + "}\noptim: {learning_rate: 1e-3, beta: 0.9}\n";
    a.push_back(write(run));
    run.arm = "exact";
    run.config = "train: {arm: exact, seed: " + std::to_string(seed) + "}\noptim: {learning_rate: 1e-4, beta: 0.9}\n";
    b.push_back(write(run));
  }
  const auto notes = compare_rewards(a, b, {}).notes;
  EXPECT_THAT(notes, ::testing::Contains(HasSubstr("optim.learning_rate: 1e-3 | 1e-4")));
  EXPECT_THAT(notes, Not(::testing::Contains(HasSubstr("beta"))));
  EXPECT_THAT(notes, Not(::testing::Contains(HasSubstr("train."))));
}

TEST_F(Rewards, RefusesWhatIsNoFairComparison) {
  const auto a = side("reference", {0.7, 0.8});
  const auto good = write(learning("exact", 1, 0.7));
  expect_refused(a, {good, write(learning("exact", 1, 0.8))}, "both of seed 1 and arm exact");
  expect_refused(a, {good, write(learning("tail", 2, 0.8))}, "arms exact and tail on one side");
  SampleRun other = learning("exact", 2, 0.8);
  other.model = "others";
  expect_refused(a, {good, write(other)}, "model_sha256 weights and others");
  other = learning("exact", 2, 0.8);
  other.data = "others";
  expect_refused(a, {good, write(other)}, "data_sha256 prompts and others");
  other = learning("exact", 2, 0.8);
  for (auto& row : other.rows) row.prompt_id += "'";
  expect_refused(a, {good, write(other)}, "no evaluation of prompt p0");
  expect_refused(a, {write(SampleRun{.arm = "exact", .seed = 1})}, "/rewards: no reward");
  other = learning("exact", 2, 0.8);
  other.rows[3].reward = std::numeric_limits<double>::infinity();
  expect_refused(a, {write(other)}, "reward inf, expected a finite one");
  expect_refused(a, {folder_.file("missing.h5")}, "missing.h5");
  expect_refused<ConfigError>(a, {}, "a side without records");
  expect_refused<ConfigError>(a, {good}, "--margin: got 0", {.margin = 0});
  expect_refused<ConfigError>(a, {good}, "--level: got 0.5", {.level = 0.5});
}

TEST_F(Rewards, EachSeedMayHaveWeightsOfItsOwn) {
  std::vector<std::string> a, b;
  for (std::int64_t seed = 1; seed <= 2; ++seed) {
    SampleRun run = learning("reference", seed, 0.7 + 0.01 * static_cast<double>(seed));
    run.model = "weights of " + std::to_string(seed);
    a.push_back(write(run));
    run.arm = "exact";
    b.push_back(write(run));
  }
  EXPECT_EQ(compare_rewards(a, b, {}).verdict, RewardVerdict::kEquivalent);
  SampleRun run = learning("exact", 1, 0.7);
  run.model = "weights of 2";
  expect_refused(a, {write(run), b[1]}, "model_sha256 weights of 1 and weights of 2");
}

TEST_F(Rewards, AnInterruptedRunNeedsToBeAccepted) {
  SampleRun run = learning("exact", 1, 0.7);
  run.closed = false;
  const auto a = side("reference", {0.7});
  const std::vector<std::string> b{write(run)};
  expect_refused(a, b, "--partial");
  EXPECT_THAT(compare_rewards(a, b, {.accept_unclosed = true}).notes, ::testing::Contains(HasSubstr("interrupted runs")));
}

// --- The report.
TEST_F(Rewards, TheReportIsTheSameInTextAndJson) {
  const auto report = compare_rewards(side("reference", {1, 1, 1}), side("detached", {0.3, 0.35, 0.34}), {});
  const auto text = reward_report_text(report);
  EXPECT_THAT(text, AllOf(HasSubstr("A  reference  3 runs, seeds 1 2 3"), HasSubstr("paired by seed"), HasSubstr("mean"),
                          HasSubstr("verdict: different: detached earns 0.6700 less than reference, beyond 0.0500")));
  const auto json = reward_report_json(report);
  EXPECT_EQ(json["verdict"], "different");
  EXPECT_EQ(json["exit_status"], 1);
  EXPECT_EQ(json["a"]["arm"], "reference");
  EXPECT_NEAR(json["difference"]["mean"].get<double>(), -0.67, kClose);
  EXPECT_EQ(json["tests"]["p_different"].get<double>(), report.p_different);
  EXPECT_EQ(json["curves"]["train"].size(), 20u);
  EXPECT_EQ(json["more_seeds"], nullptr);
}

TEST_F(Rewards, WhatIsNotKnownIsNullAndADash) {
  const auto report = compare_rewards(side("reference", {1}), side("exact", {1}), {});
  const auto json = reward_report_json(report);
  EXPECT_EQ(json["difference"]["interval"][0], nullptr);
  EXPECT_EQ(json["effect_size"], nullptr);
  for (const char* name : {"t", "degrees", "p_different", "p_lower", "p_upper", "p_equivalent"}) {
    EXPECT_EQ(json["tests"][name], nullptr) << name;
  }
  EXPECT_THAT(reward_report_text(report), AllOf(HasSubstr("verdict: undecided: one run a side"), Not(HasSubstr("nan"))));
}

TEST_F(Rewards, LongRunsAreDrawnInHundredPointsAndTenLines) {
  SampleRun run{.arm = "reference"};
  for (std::int64_t step = 1; step <= 1234; ++step) {
    for (const auto& row : rows_at(step, "train", {static_cast<double>(step)})) run.rows.push_back(row);
  }
  const auto a = write(run);
  run.arm = "exact";
  const auto report = compare_rewards({a}, {write(run)}, {});
  ASSERT_EQ(report.train_curve.size(), 100u);
  EXPECT_EQ(report.train_curve.back().step, 1234);
  EXPECT_EQ(report.train_curve.front().step, 12);
  EXPECT_DOUBLE_EQ(report.train_curve.front().mean_a, 6.5);
  double sum = 0;
  for (const auto& p : report.train_curve) sum += p.mean_a;
  EXPECT_NEAR(sum / 100, 617.5, 6);
  const auto text = reward_report_text(report);
  EXPECT_EQ(std::count(text.begin(), text.end(), '*'), 10);
}

}  // namespace
}  // namespace longstraw::compare
