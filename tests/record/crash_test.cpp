// A process that dies leaves whole steps only: stopped before each single change of the disk, and killed at random moments.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include "core/base/errors.h"
#include "core/record/journal.h"
#include "core/record/journaled_file.h"
#include "core/record/reader.h"
#include "core/record/writer.h"
#include "tests/record/sample_record.h"

namespace longstraw::core::record {
namespace {

using namespace testing;

constexpr std::int64_t kSteps = 4;
constexpr int kStopped = 77;

// Writes a record and dies, without any clean-up, before change number `stop_at` of the disk.
[[noreturn]] void write_until(const std::string& path, std::int64_t stop_at) {
  std::int64_t changes = 0;
  const auto count = [&] {
    if (changes++ == stop_at) ::_exit(kStopped);
  };
  try {
    RecordWriter writer(path, sample_header(), {.durable = false, .before_write = count});
    for (std::int64_t step = 0; step < kSteps; ++step) write_sample_step(writer, step);
    writer.close();
  } catch (const std::exception& error) {
    ::fprintf(stderr, "writer: %s\n", error.what());
    ::_exit(1);
  }
  ::_exit(0);
}

// How many steps a record has; each of them must be whole, and they must be the first ones. -1: there is no record.
std::int64_t whole_steps(const std::string& path) {
  if (!std::filesystem::exists(path)) return -1;
  const auto steps = RecordReader(path).steps();
  for (std::size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i], static_cast<std::int64_t>(i));
    EXPECT_NO_THROW(check_sample_step(path, steps[i]));
  }
  return static_cast<std::int64_t>(steps.size());
}

TEST(Crash, BeforeAnyChangeOfTheDiskLeavesWholeSteps) {
  std::int64_t last = -1, healed = 0;
  bool finished = false;
  for (std::int64_t stop_at = 0; !finished; ++stop_at) {
    const TemporaryFolder folder;
    const auto path = folder.file("r.h5");
    const pid_t child = ::fork();
    if (child == 0) write_until(path, stop_at);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    ASSERT_TRUE(WEXITSTATUS(status) == kStopped || WEXITSTATUS(status) == 0);
    finished = WEXITSTATUS(status) == 0;
    healed += std::filesystem::exists(journal_path(path)) ? 1 : 0;
    const std::int64_t steps = whole_steps(path);
    EXPECT_GE(steps, last) << "stopped before change " << stop_at;
    last = steps;
    EXPECT_FALSE(std::filesystem::exists(journal_path(path)) && steps >= 0);
    if (steps >= 0 && RecordReader(path).closed()) {
      EXPECT_EQ(steps, kSteps);
    }
    if (finished) {
      EXPECT_TRUE(RecordReader(path).closed());
    }
  }
  EXPECT_EQ(last, kSteps);
  EXPECT_GT(healed, 0) << "no stop fell inside a commit: the test did not test the journal";
}

TEST(Crash, KilledAtRandomMomentsLeavesWholeSteps) {
  const TemporaryFolder folder;
  std::int64_t with_steps = 0;
  for (int trial = 0; trial < 40; ++trial) {
    const auto path = folder.file(fmt::format("r{}.h5", trial));
    const pid_t child = ::fork();
    if (child == 0) {
      RecordWriter writer(path, sample_header(), {.durable = false});
      for (std::int64_t step = 0;; ++step) write_sample_step(writer, step);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(2000 + 1777 * trial));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    if (whole_steps(path) > 0) ++with_steps;
    if (std::filesystem::exists(path)) {
      EXPECT_FALSE(RecordReader(path).closed());
    }
  }
  EXPECT_GT(with_steps, 0);
}

// From change number `stop_at` on the disk accepts nothing any more; the writer reports it and cleans up.
[[noreturn]] void write_until_the_disk_is_full(const std::string& path, std::int64_t stop_at) {
  std::signal(SIGXFSZ, SIG_IGN);
  std::int64_t changes = 0;
  const auto fill = [&] {
    if (changes++ != stop_at) return;
    const rlimit nothing{.rlim_cur = 0, .rlim_max = 0};
    ::setrlimit(RLIMIT_FSIZE, &nothing);
  };
  try {
    RecordWriter writer(path, sample_header(), {.durable = false, .before_write = fill});
    for (std::int64_t step = 0; step < kSteps; ++step) write_sample_step(writer, step);
    writer.close();
  } catch (const IoError&) {
    ::_exit(kStopped);
  } catch (...) {
    ::_exit(1);
  }
  ::_exit(0);
}

TEST(Crash, AFullDiskAtAnyMomentLeavesWholeSteps) {
  std::int64_t last = -1;
  int finished = 0;
  // A disk that fills up before the last changes (removing the journal) is not noticed: go on until three runs in a row end well.
  for (std::int64_t stop_at = 0; finished < 3; ++stop_at) {
    const TemporaryFolder folder;
    const auto path = folder.file("r.h5");
    const pid_t child = ::fork();
    if (child == 0) write_until_the_disk_is_full(path, stop_at);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status)) << "died at change " << stop_at;
    ASSERT_TRUE(WEXITSTATUS(status) == kStopped || WEXITSTATUS(status) == 0) << WEXITSTATUS(status);
    finished = WEXITSTATUS(status) == 0 ? finished + 1 : 0;
    EXPECT_FALSE(std::filesystem::exists(partial_path(path)));
    const std::int64_t steps = whole_steps(path);
    EXPECT_GE(steps, last) << "full before change " << stop_at;
    if (finished > 0) {
      EXPECT_EQ(steps, kSteps);
    }
    last = steps;
  }
}

TEST(Crash, ALeftoverPartialFileIsNoRecordAndDoesNotDisturbTheNext) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  const pid_t child = ::fork();
  if (child == 0) write_until(path, 3);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(std::filesystem::exists(partial_path(path)));
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_THROW(RecordReader reader(path), FormatError);
  RecordWriter writer(path, sample_header());
  write_sample_step(writer, 0);
  writer.close();
  EXPECT_FALSE(std::filesystem::exists(partial_path(path)));
  EXPECT_NO_THROW(check_sample_step(path, 0));
}

TEST(Crash, AHalfWrittenJournalIsIgnored) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  RecordWriter writer(path, sample_header());
  write_sample_step(writer, 0);
  writer.close();
  FILE* journal = ::fopen(journal_path(path).c_str(), "w");
  ::fputs("LSJRNL01 and then the process died", journal);
  ::fclose(journal);
  EXPECT_EQ(whole_steps(path), 1);
  EXPECT_FALSE(std::filesystem::exists(journal_path(path)));
}

}  // namespace
}  // namespace longstraw::core::record
