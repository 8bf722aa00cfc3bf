// A study keeps its cells bit for bit, is continued where it stopped, and refuses what does not belong to it.

#include "core/record/study.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "core/base/errors.h"
#include "core/record/journaled_file.h"
#include "core/record/reader.h"
#include "core/record/writer.h"
#include "tests/record/sample_record.h"

namespace longstraw::core::record {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

const StudyWriterOptions kFast{.durable = false};

StudyHeader header() {
  return {.command = "longstraw study --tail 0,16", .config_yaml = "seed: 3\n", .torch_version = "2.11", .device = "cpu"};
}

StudyCell cell(std::int64_t prompt, std::int64_t tail) {
  StudyCell c{.key = {.family = "llama",
                      .model = "SmolLM2-135M",
                      .arm = tail == 0 ? "detached" : "tail",
                      .dtype = "float32",
                      .prompt_tokens = prompt,
                      .group_size = 4,
                      .response_tokens = 32,
                      .tail_tokens = tail,
                      .seed = 3},
              .inputs = {.model_sha256 = "a1", .data_sha256 = "b2"},
              .git_commit = "c0ffee",
              .numbers = {{"loss", 0.1 * static_cast<double>(prompt)}, {"seconds", 2.5}},
              .rows = {}};
  const auto row = [&](StudyScope scope, std::int64_t layer, const char* kind) {
    const double x = 0.1 + static_cast<double>(c.rows.size());
    c.rows.push_back({.scope = scope,
                      .layer = layer,
                      .kind = kind,
                      .elements = 10,
                      .reference_norm = x,
                      .candidate_norm = x / 3,
                      .difference_norm = x / 7,
                      .cosine = 1 / x,
                      .relative_l2 = std::numeric_limits<double>::infinity(),
                      .norm_ratio = 1e-300,
                      .sign_agreement = 0.5,
                      .update_cosine = -x,
                      .sign_cosine = static_cast<double>(tail)});
  };
  row(StudyScope::kWhole, -1, "");
  row(StudyScope::kLayer, 0, "");
  row(StudyScope::kKind, -1, "self_attn.q_proj.weight");
  row(StudyScope::kLayerAndKind, 0, "self_attn.q_proj.weight");
  return c;
}

template <class Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Study, KeepsCellsInTheirOrderBitForBit) {
  const TemporaryFolder folder;
  const auto path = folder.file("study.h5");
  const std::vector<StudyCell> cells{cell(256, 16), cell(64, 0), cell(64, 16)};
  StudyWriter writer(path, header(), kFast);
  for (const auto& c : cells) writer.append(c);
  writer.close();
  const StudyReader reader(path);
  EXPECT_TRUE(reader.closed());
  EXPECT_EQ(reader.header(), header());
  EXPECT_EQ(reader.cells(), cells);
}

TEST(Study, ContinuesWhereItStopped) {
  const TemporaryFolder folder;
  const auto path = folder.file("study.h5");
  {
    StudyWriter writer(path, header(), kFast);
    writer.append(cell(64, 0));
    writer.append(cell(64, 16));  // and the run is interrupted
  }
  EXPECT_FALSE(StudyReader(path).closed());
  auto later = header();
  later.command += " --resume";
  StudyWriter writer(path, later, kFast);
  EXPECT_EQ(writer.size(), 2);
  EXPECT_TRUE(writer.has(cell(64, 16).key, cell(64, 16).inputs));
  EXPECT_FALSE(writer.has(cell(256, 0).key, cell(256, 0).inputs));
  writer.append(cell(256, 0));
  writer.close();
  const StudyReader reader(path);
  EXPECT_TRUE(reader.closed());
  EXPECT_EQ(reader.header(), later);
  EXPECT_EQ(reader.cells(), (std::vector<StudyCell>{cell(64, 0), cell(64, 16), cell(256, 0)}));
}

TEST(Study, EveryCoordinateTellsCellsApart) {
  const TemporaryFolder folder;
  StudyWriter writer(folder.file("study.h5"), header(), kFast);
  writer.append(cell(64, 16));
  const StudyKey key = cell(64, 16).key;
  EXPECT_TRUE(writer.has(key));
  for (auto member : {&StudyKey::family, &StudyKey::model, &StudyKey::arm, &StudyKey::dtype}) {
    StudyKey other = key;
    other.*member += "x";
    EXPECT_FALSE(writer.has(other)) << describe(other);
  }
  for (auto member :
       {&StudyKey::prompt_tokens, &StudyKey::group_size, &StudyKey::response_tokens, &StudyKey::tail_tokens, &StudyKey::seed}) {
    StudyKey other = key;
    ++(other.*member);
    EXPECT_FALSE(writer.has(other)) << describe(other);
  }
}

TEST(Study, OpeningToContinueAndGivingUpChangesNothing) {
  const TemporaryFolder folder;
  const auto path = folder.file("study.h5");
  {
    StudyWriter writer(path, header(), kFast);
    writer.append(cell(64, 0));
    writer.close();
  }
  { const StudyWriter writer(path, {}, kFast); }
  EXPECT_TRUE(StudyReader(path).closed());
  EXPECT_EQ(StudyReader(path).header(), header());
  EXPECT_FALSE(std::filesystem::exists(partial_path(path)));
}

TEST(Study, RefusesACellMadeFromOtherInputs) {
  const TemporaryFolder folder;
  const auto path = folder.file("study.h5");
  StudyWriter writer(path, header(), kFast);
  writer.append(cell(64, 16));
  StudyInputs other = cell(64, 16).inputs;
  other.model_sha256 = "d4";
  EXPECT_THROW(writer.has(cell(64, 16).key, other), FormatError);
  EXPECT_THAT(message_of([&] { writer.has(cell(64, 16).key, other); }),
              AllOf(HasSubstr(path), HasSubstr("P=64"), HasSubstr("W=16"), HasSubstr("model_sha256 a1, expected d4")));
}

TEST(Study, RefusesACellTwiceAndACellWithoutItsWhole) {
  const TemporaryFolder folder;
  const auto path = folder.file("study.h5");
  StudyWriter writer(path, header(), kFast);
  writer.append(cell(64, 16));
  EXPECT_THROW(writer.append(cell(64, 16)), ConfigError);
  auto headless = cell(64, 0);
  headless.rows.erase(headless.rows.begin());
  EXPECT_THROW(writer.append(headless), ConfigError);
  auto doubled = cell(64, 0);
  doubled.rows.push_back(doubled.rows.front());
  EXPECT_THROW(writer.append(doubled), ConfigError);
  writer.close();
  EXPECT_EQ(StudyReader(path).cells(), std::vector{cell(64, 16)});
  EXPECT_THROW(writer.append(cell(64, 0)), ConfigError);
}

TEST(Study, IsNoRecordAndARecordIsNoStudy) {
  const TemporaryFolder folder;
  const auto study = folder.file("study.h5"), record = folder.file("record.h5");
  {
    StudyWriter writer(study, header(), kFast);
    writer.append(cell(64, 0));
  }
  {
    RecordWriter writer(record, sample_header(), {.durable = false});
    write_sample_step(writer, 0);
    writer.close();
  }
  EXPECT_THAT(message_of([&] { StudyReader reader(record); }), HasSubstr("no study"));
  EXPECT_THAT(message_of([&] { StudyWriter writer(record, header(), kFast); }), HasSubstr("no study"));
  EXPECT_THAT(message_of([&] { RecordReader reader(study); }), HasSubstr("no record"));
  EXPECT_NO_THROW(check_sample_step(record, 0));  // not replaced by the attempt
  EXPECT_THAT(message_of([&] { StudyReader reader(folder.file("absent.h5")); }), HasSubstr("no such file"));
}

TEST(Study, HasOneWriter) {
  const TemporaryFolder folder;
  const auto path = folder.file("study.h5");
  StudyWriter writer(path, header(), kFast);
  EXPECT_THROW(StudyWriter(path, header(), kFast), IoError);
  writer.append(cell(64, 0));
  EXPECT_THAT(message_of([&] { StudyWriter second(path, header(), kFast); }), HasSubstr("being written by another process"));
  writer.append(cell(64, 16));
  writer.close();
  EXPECT_EQ(StudyReader(path).size(), 2);
}

// Continues a study of one cell with two more and dies, without any clean-up, before change number `stop_at` of the disk.
[[noreturn]] void continue_until(const std::string& path, std::int64_t stop_at) {
  std::int64_t changes = 0;
  const auto count = [&] {
    if (changes++ == stop_at) ::_exit(77);
  };
  try {
    StudyWriter writer(path, header(), {.durable = false, .before_write = count});
    writer.append(cell(64, 16));
    writer.append(cell(256, 16));
    writer.close();
  } catch (const std::exception& error) {
    ::fprintf(stderr, "writer: %s\n", error.what());
    ::_exit(1);
  }
  ::_exit(0);
}

TEST(Study, ADeathAtAnyMomentLeavesWholeCells) {
  const std::vector<StudyCell> all{cell(64, 0), cell(64, 16), cell(256, 16)};
  std::size_t last = 1;
  bool finished = false;
  for (std::int64_t stop_at = 0; !finished; ++stop_at) {
    const TemporaryFolder folder;
    const auto path = folder.file("study.h5");
    {
      StudyWriter writer(path, header(), kFast);
      writer.append(all[0]);
      writer.close();
    }
    const pid_t child = ::fork();
    if (child == 0) continue_until(path, stop_at);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    ASSERT_TRUE(WEXITSTATUS(status) == 77 || WEXITSTATUS(status) == 0);
    finished = WEXITSTATUS(status) == 0;
    const auto cells = StudyReader(path).cells();
    ASSERT_GE(cells.size(), last) << "stopped before change " << stop_at;
    EXPECT_TRUE(std::equal(cells.begin(), cells.end(), all.begin())) << "stopped before change " << stop_at;
    last = cells.size();
    StudyWriter after(path, header(), kFast);  // and what is left can be continued
    EXPECT_EQ(after.size(), static_cast<std::int64_t>(cells.size()));
  }
  EXPECT_EQ(last, all.size());
}

}  // namespace
}  // namespace longstraw::core::record
