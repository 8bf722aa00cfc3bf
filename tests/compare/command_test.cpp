// The command's exit statuses are a contract.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "compare/command.h"
#include "tests/compare/synthetic_run.h"
#include "tests/record/sample_record.h"

namespace longstraw::compare {
namespace {

using namespace testing;
using core::record::testing::TemporaryFolder;
using ::testing::HasSubstr;

struct Outcome {
  int status = 0;
  std::string out, err;
};

Outcome run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "longstraw-compare");
  std::vector<char*> argv;
  for (auto& argument : arguments) argv.push_back(argument.data());
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  Outcome outcome;
  outcome.status = compare_main(static_cast<int>(argv.size()), argv.data());
  outcome.out = ::testing::internal::GetCapturedStdout();
  outcome.err = ::testing::internal::GetCapturedStderr();
  return outcome;
}

struct Records {
  TemporaryFolder folder;
  SyntheticStep step = synthetic_step();
  std::string reference = write_run(folder.file("b.h5"), synthetic_header("reference", "float32"), {step});
  std::string same = write_run(folder.file("same.h5"), synthetic_header("exact", "float32"), {step});
  std::string other;
  Records() {
    auto changed = step;
    for (double& v : changed.gradients.at("model.norm.weight").values) v = -v;
    other = write_run(folder.file("other.h5"), synthetic_header("exact", "float32"), {changed});
  }
};

TEST(Command, ZeroWithinBoundsOneBeyond) {
  const Records r;
  const auto within = run({r.reference, r.same});
  EXPECT_EQ(within.status, 0);
  EXPECT_THAT(within.out, HasSubstr("verdict: within bounds"));
  const auto beyond = run({r.reference, r.other});
  EXPECT_EQ(beyond.status, 1);
  EXPECT_THAT(beyond.out, HasSubstr("wrong_sign"));
  EXPECT_EQ(run({r.reference, r.other, "--whole-bound", "3", "--parameter-bound", "3"}).status, 0);
}

TEST(Command, JsonIsParsedBack) {
  const Records r;
  const auto json = nlohmann::json::parse(run({r.reference, r.other, "--json"}).out);
  EXPECT_EQ(json["verdict"], "fail");
  EXPECT_EQ(json["exit_status"], 1);
  EXPECT_EQ(json["steps"][0]["findings"][0]["name"], "wrong_sign");
}

TEST(Command, WritesTheReportToAFile) {
  const Records r;
  const auto file = r.folder.file("report.json");
  const auto outcome = run({r.reference, r.same, "--json", "--out", file});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.out, "");
  std::ifstream in(file);
  EXPECT_EQ(nlohmann::json::parse(in)["verdict"], "pass");
}

TEST(Command, TwoForWrongUseAndUnusableInput) {
  const Records r;
  EXPECT_EQ(run({}).status, 2);
  EXPECT_EQ(run({r.reference}).status, 2);
  EXPECT_EQ(run({r.reference, r.same, "--no-such-option"}).status, 2);
  EXPECT_EQ(run({r.reference, r.same, "--noise-factor", "many"}).status, 2);
  const auto missing = run({r.reference, r.folder.file("none.h5")});
  EXPECT_EQ(missing.status, 2);
  EXPECT_THAT(missing.err, HasSubstr("none.h5: no such file"));
  std::filesystem::resize_file(r.same, std::filesystem::file_size(r.same) / 2);
  const auto truncated = run({r.reference, r.same});
  EXPECT_EQ(truncated.status, 2);
  EXPECT_THAT(truncated.err, HasSubstr("same.h5"));
}

TEST(Command, ThreeWhenTheReportCannotBeWritten) {
  const Records r;
  const auto outcome = run({r.reference, r.same, "--out", r.folder.file("no/such/folder.txt")});
  EXPECT_EQ(outcome.status, 3);
  EXPECT_THAT(outcome.err, HasSubstr("folder.txt"));
}

TEST(Command, HelpIsNoError) {
  const auto help = run({"--help"});
  EXPECT_EQ(help.status, 0);
  for (const char* option : {"--noise", "--json", "--out", "--partial", "--parameters", "Exit status"})
    EXPECT_THAT(help.out, HasSubstr(option));
}

}  // namespace
}  // namespace longstraw::compare
