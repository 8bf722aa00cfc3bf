// A record goes on where a checkpoint was: what came later is dropped, all at once, whatever moment the process dies at.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <set>

#include "core/base/errors.h"
#include "core/record/journal.h"
#include "core/record/journaled_file.h"
#include "core/record/reader.h"
#include "core/record/writer.h"
#include "tests/record/sample_record.h"

namespace longstraw::core::record {
namespace {

using namespace testing;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kStopped = 77;
constexpr std::int64_t kSteps = 4;
constexpr std::int64_t kFrom = 2;

RecordHeader header_of(const std::string& commit) {
  RecordHeader header = sample_header();
  header.git_commit = commit;
  header.extra = {{commit + "_note", "of this run"}};
  return header;
}

std::map<std::string, double> sample_metrics(std::int64_t step) {
  std::map<std::string, double> values{{"loss", 0.5 * static_cast<double>(step)},
                                       {"rewards/correct/mean", 1.0 / static_cast<double>(step + 1)}};
  if (step >= 2) values["kl"] = 1e-3;
  return values;
}

void write_steps(RecordWriter& writer, std::int64_t begin, std::int64_t end) {
  for (std::int64_t step = begin; step < end; ++step) {
    write_sample_step(writer, step);  // with its rewards
    writer.append_metrics(step, sample_metrics(step));
  }
}

void write_record(const std::string& path, bool closed, bool durable = false) {
  RecordWriter writer(path, header_of("old"), {.durable = durable});
  write_steps(writer, 0, kSteps);
  if (closed) writer.close();
}

// All rows are of whole steps below `end`, and those of rewards and metrics are all there.
void expect_first_steps(const std::string& path, std::int64_t end) {
  const RecordReader record(path);
  std::vector<std::int64_t> steps;
  std::vector<RewardRow> rewards;
  std::vector<MetricsRow> metrics;
  for (std::int64_t step = 0; step < end; ++step) {
    steps.push_back(step);
    for (auto& row : sample_rewards(step)) rewards.push_back(row);
    metrics.push_back({step, sample_metrics(step)});
  }
  EXPECT_EQ(record.steps(), steps);
  EXPECT_EQ(record.rewards(), rewards);
  EXPECT_EQ(record.metrics(), metrics);
  for (const std::int64_t step : steps) EXPECT_NO_THROW(check_sample_step(path, step, record.header())) << step;
}

class Resume : public ::testing::TestWithParam<bool> {};

TEST_P(Resume, GoesOnAsIfNeverStopped) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  write_record(path, GetParam());
  for (const std::int64_t from : {kFrom, kSteps, std::int64_t{0}, kFrom}) {
    SCOPED_TRACE(from);
    RecordWriter writer(path, header_of("new"), {.resume_from_step = from});
    EXPECT_THROW(RecordReader reader(path), FormatError);  // it is being written
    write_steps(writer, from, kSteps);
    writer.close();
    expect_first_steps(path, kSteps);
    EXPECT_TRUE(RecordReader(path).closed());
    EXPECT_EQ(RecordReader(path).header(), header_of("new"));
  }
}
INSTANTIATE_TEST_SUITE_P(ClosedOrNot, Resume, ::testing::Bool());

TEST(ResumeRecord, DropsWhatCameLaterAtOnce) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  write_record(path, true);
  { const RecordWriter writer(path, header_of("new"), {.resume_from_step = kFrom}); }
  expect_first_steps(path, kFrom);
  EXPECT_FALSE(RecordReader(path).closed());
  EXPECT_EQ(RecordReader(path).header(), header_of("new"));
}

TEST(ResumeRecord, BeginsAMissingFile) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  RecordWriter writer(path, header_of("new"), {.resume_from_step = 0});
  write_steps(writer, 0, kSteps);
  writer.close();
  expect_first_steps(path, kSteps);
}

TEST(ResumeRecord, RefusesOtherFixedInputsByNameAndChangesNothing) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  write_record(path, true);
  const auto size = std::filesystem::file_size(path);
  const auto refuses = [&](const char* message, const std::function<void(RecordHeader&)>& change) {
    RecordHeader header = header_of("new");
    change(header);
    EXPECT_THAT([&] { RecordWriter(path, header, {.resume_from_step = kFrom}); }, ThrowsMessage<FormatError>(HasSubstr(message)));
  };
  refuses("attribute arm: exact, but the run that goes on with it has detached", [](auto& h) { h.arm = "detached"; });
  refuses("attribute model_sha256", [](auto& h) { h.model_sha256 = "c3"; });
  refuses("attribute data_sha256", [](auto& h) { h.data_sha256 = "c3"; });
  refuses("attribute seed: 7", [](auto& h) { h.seed = 8; });
  refuses("attribute dtype", [](auto& h) { h.dtype = "float64"; });
  EXPECT_EQ(std::filesystem::file_size(path), size);
  expect_first_steps(path, kSteps);
  EXPECT_TRUE(RecordReader(path).closed());
  EXPECT_EQ(RecordReader(path).header(), header_of("old"));
}

TEST(ResumeRecord, RefusesWhatIsNoRecordOrInUse) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  std::ofstream(path) << "no HDF5";
  EXPECT_THROW(RecordWriter(path, header_of("new"), {.resume_from_step = 0}), FormatError);
  std::filesystem::remove(path);
  write_record(path, true);
  {
    const RecordReader reader(path);
    EXPECT_THROW(RecordWriter(path, header_of("new"), {.resume_from_step = 0}), IoError);
  }
  {
    const RecordWriter writer(path, header_of("new"), {.resume_from_step = kSteps});
    EXPECT_THROW(RecordWriter(path, header_of("new"), {.resume_from_step = 0}), IoError);
  }
  expect_first_steps(path, kSteps);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
  EXPECT_THROW(RecordWriter(path, header_of("new"), {.resume_from_step = 0}), FormatError);
}

TEST(ResumeRecord, DropsRewardsThatCameOutOfOrder) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  const auto row = [](std::int64_t step) {
    return RewardRow{
        .step = step, .split = "train", .prompt_id = fmt::format("p{}", step), .reward = 0.5, .parts = {{"right", 1.0}}};
  };
  {
    RecordWriter writer(path, header_of("old"), {.durable = false});
    for (const std::int64_t step : {4, 1, 3, 2}) writer.append_rewards({row(step)});
    writer.close();
  }
  RecordWriter writer(path, header_of("new"), {.resume_from_step = 3});
  writer.append_rewards({row(7)});
  writer.close();
  EXPECT_EQ(RecordReader(path).rewards(), (std::vector<RewardRow>{row(1), row(2), row(7)}));
}

// New gradients go behind the end of the file, not, page by page, through memory and the journal into the room of dropped ones.
TEST(ResumeRecord, TheJournalStaysSmallThoughLargeGradientsWereDropped) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  constexpr std::int64_t kElements = 1 << 18;
  const std::vector<double> large(kElements, 0.5);
  std::uintmax_t largest = 0;
  const auto look = [&] {
    std::error_code none;
    const auto size = std::filesystem::file_size(journal_path(path), none);
    if (!none) largest = std::max(largest, size);
  };
  const auto write = [&](RecordWriter&& writer, std::int64_t begin) {
    for (std::int64_t step = begin; step < 3; ++step) {
      StepWriter s = writer.begin_step(step);
      s.gradient("large", {kElements}, large.data());
      s.memory({{"peak_bytes", 1}});
      s.timing({{"total", 1.0}});
      s.commit();
      writer.append_rewards(sample_rewards(step));
    }
    writer.close();
  };
  write(RecordWriter(path, header_of("old"), {.durable = false}), 0);
  const auto size = std::filesystem::file_size(path);
  for (std::uintmax_t resumes = 1; resumes <= 3; ++resumes) {
    write(RecordWriter(path, header_of("new"), {.resume_from_step = 1, .durable = false, .before_write = look}), 1);
    EXPECT_LE(std::filesystem::file_size(path), size + resumes * 2 * 8 * kElements);
  }
  EXPECT_GT(largest, 0U);
  EXPECT_LT(largest, 8U * kElements / 10);
}

// Resumes the record and dies, without any clean-up, before change number `stop_at` of the disk.
[[noreturn]] void resume_until(const std::string& path, std::int64_t stop_at) {
  std::int64_t changes = 0;
  const auto count = [&] {
    if (changes++ == stop_at) ::_exit(kStopped);
  };
  try {
    RecordWriter writer(path, header_of("new"), {.resume_from_step = kFrom, .durable = false, .before_write = count});
    write_steps(writer, kFrom, kFrom + 1);
    writer.close();
  } catch (const std::exception& error) {
    ::fprintf(stderr, "writer: %s\n", error.what());
    ::_exit(1);
  }
  ::_exit(0);
}

TEST(ResumeRecord, KilledBeforeAnyChangeOfTheDiskItIsWholeAndResumesAgain) {
  const TemporaryFolder folder;
  write_record(folder.file("old.h5"), true);
  std::int64_t healed = 0, old = 0, dropped = 0;
  bool finished = false;
  for (std::int64_t stop_at = 0; !finished; ++stop_at) {
    SCOPED_TRACE(fmt::format("stopped before change {}", stop_at));
    const auto path = folder.file("r.h5");
    std::filesystem::copy_file(folder.file("old.h5"), path, std::filesystem::copy_options::overwrite_existing);
    const pid_t child = ::fork();
    if (child == 0) resume_until(path, stop_at);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    ASSERT_TRUE(WEXITSTATUS(status) == kStopped || WEXITSTATUS(status) == 0) << WEXITSTATUS(status);
    finished = WEXITSTATUS(status) == 0;
    healed += std::filesystem::exists(journal_path(path)) ? 1 : 0;
    // Every other one is resumed without a reader having healed it.
    if (stop_at % 2 == 0) {
      const RecordReader record(path);
      const auto steps = static_cast<std::int64_t>(record.steps().size());
      const bool as_before = record.header() == header_of("old");
      if (as_before) {
        EXPECT_EQ(steps, kSteps);
        EXPECT_TRUE(record.closed());
        ++old;
      } else {
        EXPECT_EQ(record.header(), header_of("new"));
        EXPECT_GE(steps, kFrom);
        dropped += steps == kFrom ? 1 : 0;
      }
      for (const std::int64_t step : record.steps()) EXPECT_NO_THROW(check_sample_step(path, step, record.header())) << step;
      std::set<std::int64_t> rewarded;
      for (const auto& row : record.rewards()) rewarded.insert(row.step);
      EXPECT_EQ(rewarded.size(), record.steps().size());
      for (const auto& row : record.metrics()) EXPECT_EQ(row.values, sample_metrics(row.step));
      EXPECT_LE(record.metrics().size(), record.steps().size());
      EXPECT_GE(record.metrics().size() + 1, record.steps().size());
    }
    RecordWriter writer(path, header_of("new"), {.resume_from_step = kFrom, .durable = false});
    write_steps(writer, kFrom, kSteps);
    writer.close();
    expect_first_steps(path, kSteps);
  }
  EXPECT_GT(healed, 3) << "no stop fell inside a commit";
  EXPECT_GT(old, 1);
  EXPECT_GT(dropped, 1);
}

TEST(Metrics, AreOneRowAStepWithTheNamesItHas) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  RecordWriter writer(path, header_of("new"), {.durable = false});
  writer.append_metrics(1, {{"loss", 1.5}, {"not a number", std::nan("")}});
  writer.append_metrics(1, {{"eval_reward", 0.25}, {"loss", 1.25}});
  writer.append_metrics(4, {});
  writer.append_metrics(1000, {{"rewards/β/mean", -std::numeric_limits<double>::infinity()}});
  EXPECT_THROW(writer.append_metrics(999, {{"loss", 1.0}}), ConfigError);
  for (int i = 0; i < 20; ++i) writer.append_metrics(1001 + i, {{fmt::format("m{}", i), i}});
  writer.close();
  EXPECT_THROW(writer.append_metrics(5000, {}), ConfigError);
  const auto rows = RecordReader(path).metrics();
  ASSERT_EQ(rows.size(), 23U);
  EXPECT_EQ(rows[0], (MetricsRow{1, {{"eval_reward", 0.25}, {"loss", 1.25}}}));
  EXPECT_EQ(rows[1], (MetricsRow{4, {}}));
  EXPECT_EQ(rows[2], (MetricsRow{1000, {{"rewards/β/mean", -std::numeric_limits<double>::infinity()}}}));
  EXPECT_EQ(rows[22], (MetricsRow{1020, {{"m19", 19.0}}}));
}

TEST(Rows, WaitAndArePublishedTogether) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  const auto published = [&] {
    const auto copy = folder.file("copy.h5");
    if (!std::filesystem::exists(path)) return std::size_t{0};
    std::filesystem::copy_file(path, copy, std::filesystem::copy_options::overwrite_existing);
    return RecordReader(copy).metrics().size();
  };
  RecordWriter writer(path, header_of("new"), {.durable = false, .rows_wait_seconds = 3600});
  writer.append_metrics(1, {{"loss", 1.0}});
  writer.append_rewards(sample_rewards(1));
  EXPECT_EQ(published(), 0U);
  writer.publish();
  EXPECT_EQ(published(), 1U);
  writer.append_metrics(2, {{"loss", 1.0}});
  EXPECT_EQ(published(), 1U);
  write_sample_step(writer, 2);
  EXPECT_EQ(published(), 2U);
  writer.append_metrics(3, {{"loss", 1.0}});
  writer.close();
  EXPECT_EQ(published(), 3U);
}

}  // namespace
}  // namespace longstraw::core::record
