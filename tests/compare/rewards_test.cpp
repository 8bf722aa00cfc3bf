// The verdict on rewards from records: what is compared with what, by which test, what is refused. Statistics are held to scipy.

#include "compare/rewards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "compare/rewards_statistics.h"
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

// --- The statistics. Expected values by scipy 1.17.1, on these numbers: stats.ttest_rel(b, a), ttest_ind(c, a, equal_var=False)
// with their confidence_interval(0.9); the margin's tests as ttest_rel(b, 0.95 * a, alternative="greater"), ttest_rel(b, 1.05 * a,
// alternative="less") and likewise; ks_2samp, with p by counting ks_2samp over itertools.combinations and product of the runs.
const Values kA{0.71, 0.64, 0.80, 0.68, 0.75}, kB{0.69, 0.66, 0.74, 0.65, 0.77}, kC{0.31, 0.52, 0.44, 0.36};
constexpr double kClose = 1e-12;  // both sides sum a few numbers near 1 in double and evaluate the same function

TEST(RewardStatistics, PairedTestsAreScipys) {
  const auto d = decide(kA, kB, true, {});
  EXPECT_NEAR(d.t, -0.911322376865767, kClose);
  EXPECT_EQ(d.degrees, 4);
  EXPECT_NEAR(d.p_different, 0.41367853187424564, kClose);
  EXPECT_NEAR(d.difference.low, -0.046750051755800666, kClose);
  EXPECT_NEAR(d.difference.high, 0.01875005175580062, kClose);
  EXPECT_NEAR(d.p_lower, 0.10543195180421754, kClose);
  EXPECT_NEAR(d.p_upper, 0.018453512527698453, kClose);
  EXPECT_NEAR(d.effect_size, -0.3251824460311758, kClose);
  EXPECT_NEAR(d.margin, 0.05 * 0.716, kClose);
  EXPECT_EQ(d.verdict, RewardVerdict::kUndecided);
}

TEST(RewardStatistics, AnAbsoluteMarginIsScipysOneSampleTest) {
  const auto d = decide(kA, kB, true, {.absolute_margin = 0.06});
  EXPECT_NEAR(d.p_lower, 0.020082715921668024, kClose);
  EXPECT_NEAR(d.p_upper, 0.0042708573262022955, kClose);
  EXPECT_EQ(d.verdict, RewardVerdict::kEquivalent);
}

TEST(RewardStatistics, UnpairedTestsAreScipysWelch) {
  const auto d = decide(kA, kC, false, {});
  EXPECT_NEAR(d.t, -5.73967974856778, kClose * 10);
  EXPECT_NEAR(d.degrees, 5.061313387840787, kClose * 10);
  EXPECT_NEAR(d.p_different, 0.002160915453494928, kClose);
  EXPECT_NEAR(d.difference.low, -0.4165169624554103, kClose);
  EXPECT_NEAR(d.difference.high, -0.20048303754458996, kClose);
  EXPECT_NEAR(d.p_lower, 0.9980509765437188, kClose);
  EXPECT_NEAR(d.p_upper, 0.000614287024267733, kClose);
  EXPECT_NEAR(d.effect_size, -3.4909821553816403, kClose * 10);
  EXPECT_EQ(d.verdict, RewardVerdict::kDifferent);
  const auto wide = decide(kA, kC, false, {.margin = 0.6});
  EXPECT_NEAR(wide.p_lower, 0.037456170880163335, kClose);
  EXPECT_NEAR(wide.p_upper, 5.285783372443645e-06, kClose);
}

TEST(RewardStatistics, KolmogorovSmirnovIsScipysWithRunsPermuted) {
  const std::vector<Values> a{{0.1, 0.4, 0.4, 0.9}, {0.2, 0.5, 0.5, 1.0}, {0.3, 0.3, 0.8, 0.6}};
  const std::vector<Values> b{{0.1, 0.2, 0.2, 0.4}, {0.6, 0.1, 0.0, 0.3}, {0.2, 0.0, 0.5, 0.1}};
  const auto unpaired = ks_over_runs(a, b, false, 0), paired = ks_over_runs(a, b, true, 0);
  EXPECT_NEAR(unpaired.statistic, 0.5, kClose);
  EXPECT_NEAR(unpaired.p, 2.0 / 20, kClose);
  EXPECT_NEAR(paired.statistic, 0.5, kClose);
  EXPECT_NEAR(paired.p, 2.0 / 8, kClose);
}

TEST(RewardStatistics, ManyRunsArePermutedAtRandomAndAgreeWithAll) {
  // Runs of one reward each, B's above all of A's: only the observed arrangement and its mirror are as far apart.
  std::vector<Values> a, b;
  for (int i = 0; i < 20; ++i) {
    a.push_back({0.01 * i});
    b.push_back({1 + 0.01 * i});
  }
  for (const bool paired : {true, false}) {
    const auto ks = ks_over_runs(a, b, paired, 3);
    EXPECT_EQ(ks.statistic, 1);
    EXPECT_EQ(ks.p, 1.0 / 2001);
    EXPECT_EQ(ks_over_runs(a, a, paired, 3).p, 1);
  }
}

TEST(RewardStatistics, SeedsToDecideAreWhereScipysNoncentralTPassesFourFifths) {
  // scipy.stats.nct.sf(t.ppf(.975, n - 1), n - 1, .1875 * sqrt(n) / .2286737122335374) passes 0.8 at n = 14.
  const Values a{0.65, 0.45, 0.60, 0.55}, b{0.30, 0.60, 0.30, 0.30};
  const auto different = decide(a, b, true, {});
  ASSERT_EQ(different.verdict, RewardVerdict::kUndecided);
  EXPECT_EQ(seeds_to_decide(a, b, different, {}), 14);
  // nct.sf(t.ppf(.95, n - 1), n - 1, (.03 - .005) * sqrt(n) / .031091263510296053) + nct.cdf(-t.ppf(.95, n - 1), n - 1,
  // (-.005 - .03) * sqrt(n) / .031091263510296053) - 1 passes it at n = 12.
  const Values c{0.5, 0.5, 0.5, 0.5}, e{0.53, 0.48, 0.51, 0.46};
  const RewardPolicy policy{.absolute_margin = 0.03};
  const auto equivalent = decide(c, e, true, policy);
  ASSERT_EQ(equivalent.verdict, RewardVerdict::kUndecided);
  EXPECT_EQ(seeds_to_decide(c, e, equivalent, policy), 12);
}

TEST(RewardStatistics, NoNumberOfSeedsDecidesADifferenceOfJustTheMargin) {
  const Values a{0.5, 0.6, 0.4, 0.5}, b{0.57, 0.61, 0.48, 0.54};
  const RewardPolicy policy{.absolute_margin = 0.05000001};
  const auto d = decide(a, b, true, policy);
  ASSERT_EQ(d.verdict, RewardVerdict::kUndecided);
  EXPECT_EQ(seeds_to_decide(a, b, d, policy), std::nullopt);
}

TEST(RewardStatistics, TheBootstrapResamplesPairsAsPairs) {
  const Values a{0.1, 0.5, 0.9, 0.3}, b{0.2, 0.6, 1.0, 0.4};
  const auto paired = Bootstrap(4, 4, true, 1000, 1).intervals(a, b, 0.9);
  EXPECT_NEAR(paired.difference.low, 0.1, kClose);
  EXPECT_NEAR(paired.difference.high, 0.1, kClose);
  const auto unpaired = Bootstrap(4, 4, false, 1000, 1).intervals(a, b, 0.9);
  EXPECT_LT(unpaired.difference.low, 0);
  EXPECT_GT(unpaired.difference.high, 0.2);
}

TEST(RewardStatistics, TheBootstrapIsTheLawOfAllResamples) {
  const Values a{0.1, 0.5, 0.9, 0.3};
  Values means;
  for (int k = 0; k < 256; ++k) means.push_back((a[k & 3] + a[k >> 2 & 3] + a[k >> 4 & 3] + a[k >> 6]) / 4);
  std::sort(means.begin(), means.end());
  const auto quantile = [&](double share) { return means[static_cast<std::size_t>(share * 256)]; };
  const auto interval = Bootstrap(4, 4, true, 20000, 2).intervals(a, a, 0.9).a;
  const double stray = 4 * std::sqrt(0.05 * 0.95 / 20000);  // of the share of resamples below the true quantile
  EXPECT_GE(interval.low, quantile(0.05 - stray) - kClose);
  EXPECT_LE(interval.low, quantile(0.05 + stray) + kClose);
  EXPECT_GE(interval.high, quantile(0.95 - stray) - kClose);
  EXPECT_LE(interval.high, quantile(0.95 + stray) + kClose);
}

// --- The zones.
TEST(RewardVerdict, OneRunASideIsUndecidedWhateverItEarns) {
  for (const double b : {0.5, 0.0}) {
    for (const bool paired : {true, false}) {
      const auto d = decide(Values{0.5}, Values{b}, paired, {});
      EXPECT_EQ(d.verdict, RewardVerdict::kUndecided);
      EXPECT_THAT(d.notes, ElementsAre(HasSubstr("one run a side")));
      EXPECT_EQ(seeds_to_decide(Values{0.5}, Values{b}, d, {}), std::nullopt);
    }
  }
  EXPECT_EQ(decide(Values{0.5}, kB, false, {}).verdict, RewardVerdict::kUndecided);
}

TEST(RewardVerdict, ASignificantDifferenceInsideTheMarginIsEquivalent) {
  const Values a{0.50, 0.60, 0.55, 0.52}, b{0.501, 0.6011, 0.551, 0.5209};
  const auto d = decide(a, b, true, {});
  EXPECT_LT(d.p_different, 0.05);
  EXPECT_EQ(d.verdict, RewardVerdict::kEquivalent);
  EXPECT_THAT(d.notes, ElementsAre(HasSubstr("smaller than the margin")));
}

TEST(RewardVerdict, ASignificantDifferenceAcrossTheMarginIsUndecided) {
  const Values a{0.50, 0.60, 0.55, 0.52}, b{0.515, 0.64, 0.565, 0.542};  // 0.023 more, up to 0.038; the margin is 0.027
  const auto d = decide(a, b, true, {});
  EXPECT_LE(d.p_different, 0.05);
  EXPECT_GT(d.difference.high, d.margin);
  EXPECT_EQ(d.verdict, RewardVerdict::kUndecided);
}

TEST(RewardVerdict, WithoutSpreadTheMarginDecides) {
  const Values ones(3, 1.0);
  EXPECT_EQ(decide(ones, ones, true, {}).verdict, RewardVerdict::kEquivalent);
  EXPECT_EQ(decide(ones, Values(3, 0.96), true, {}).verdict, RewardVerdict::kEquivalent);
  const auto less = decide(ones, Values(3, 0.9), true, {});
  EXPECT_EQ(less.verdict, RewardVerdict::kDifferent);
  EXPECT_DOUBLE_EQ(less.p_different, 2.0 / 64);  // two outcomes of equal chance: 2 of the 2^6 ways
  EXPECT_THAT(less.notes, ElementsAre(HasSubstr("without any spread")));
  EXPECT_EQ(decide(ones, Values(3, 0.9), false, {}).verdict, RewardVerdict::kDifferent);
  // Two runs a side fall so by chance in one of eight cases.
  EXPECT_EQ(decide(Values(2, 1.0), Values(2, 0.5), true, {}).verdict, RewardVerdict::kUndecided);
}

TEST(RewardVerdict, SpreadOfRoundingSizeIsNone) {
  const Values a{0.1 + 0.2, 0.3, 0.3}, b{0.3, 0.3, 0.1 + 0.2};
  EXPECT_EQ(decide(a, b, true, {}).verdict, RewardVerdict::kEquivalent);
  EXPECT_EQ(decide(a, b, true, {}).p_different, 1);
}

TEST(RewardVerdict, EqualDifferencesOfRunsThatDifferAreACoincidence) {
  const auto d = decide(Values{0.75, 0.5}, Values{0.625, 0.375}, true, {});
  EXPECT_FALSE(d.paired);
  EXPECT_EQ(d.verdict, RewardVerdict::kUndecided);
  EXPECT_THAT(d.notes, ::testing::Contains(HasSubstr("coincidence")));
}

TEST(RewardVerdict, PairsThatEarnExactlyTheSameAreEquivalentThoughSeedsDiffer) {
  EXPECT_EQ(decide(kA, kA, true, {}).verdict, RewardVerdict::kEquivalent);
}

TEST(RewardVerdict, TwoSidesThatLearnedNothingAreNotEquivalent) {
  for (const Values& a : {Values{0, 0, 0}, Values{0.02, -0.03, 0.01}}) {
    const auto d = decide(a, a, true, {});
    EXPECT_EQ(d.verdict, RewardVerdict::kUndecided);
    EXPECT_THAT(d.notes, ::testing::Contains(HasSubstr("--absolute-margin")));
    EXPECT_EQ(decide(a, a, true, {.absolute_margin = 0.1}).verdict, RewardVerdict::kEquivalent);
  }
}

TEST(RewardVerdict, RewardsBelowZeroHaveAMarginToo) {
  Values a = kA, b = kB;
  for (auto* side : {&a, &b}) {
    for (double& v : *side) v = -v;
  }
  const auto d = decide(a, b, true, {}), mirror = decide(kA, kB, true, {});
  EXPECT_DOUBLE_EQ(d.margin, mirror.margin);
  EXPECT_DOUBLE_EQ(d.p_lower, mirror.p_upper);
  EXPECT_DOUBLE_EQ(d.p_upper, mirror.p_lower);
}

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
  auto a = side("reference", {0.71, 0.64, 0.80, 0.68, 0.75});
  auto b = side("exact", {0.69, 0.66, 0.74, 0.65, 0.77});
  std::swap(b[0], b[4]);  // the order of the files does not matter
  const auto report = compare_rewards(a, b, {});
  EXPECT_TRUE(report.paired);
  EXPECT_EQ(report.measured_on, "eval");
  EXPECT_EQ(report.last_step, 20);
  EXPECT_THAT(report.seeds_b, ElementsAre(1, 2, 3, 4, 5));
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(report.final_a[i], kA[i], kClose);
    EXPECT_NEAR(report.final_b[i], kB[i], kClose);
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
  EXPECT_EQ(json["tests"]["t"], nullptr);
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
