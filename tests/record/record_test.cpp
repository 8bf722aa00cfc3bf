// What is written reads back, and wrong use is refused by name.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hdf5.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/base/errors.h"
#include "core/record/reader.h"
#include "core/record/sketch.h"
#include "core/record/writer.h"
#include "tests/record/sample_record.h"

namespace longstraw::core::record {
namespace {

using namespace testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class E, class F>
std::string message_of(F action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "(no error of the expected type)";
}

TEST(Record, ReadsBackWhatWasWritten) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  RecordWriter writer(path, sample_header());
  for (const std::int64_t step : {0, 1, 12}) write_sample_step(writer, step);
  writer.close();
  const RecordReader record(path);
  EXPECT_TRUE(record.closed());
  EXPECT_THAT(record.steps(), ElementsAre(0, 1, 12));
  for (const std::int64_t step : {0, 1, 12}) EXPECT_NO_THROW(check_sample_step(path, step));
}

TEST(Record, KeepsNamesShapesAndDtypesWithoutReadingElements) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  RecordWriter writer(path, sample_header());
  write_sample_step(writer, 0);
  writer.close();
  const GradientInfo matrix{
      .name = "model.layers.0.self_attn.q_proj.weight", .shape = {40, 60}, .dtype = "float32", .elements = 2400};
  const GradientInfo norm{.name = "model.norm.weight", .shape = {64}, .dtype = "float64", .elements = 64};
  EXPECT_THAT(RecordReader(path).gradients(0), ElementsAre(matrix, norm));
}

TEST(Record, StreamsAnyBlockOfAGradient) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  RecordWriter writer(path, sample_header());
  write_sample_step(writer, 3);
  writer.close();
  const RecordReader record(path);
  const auto gradient = record.gradient(3, "model.layers.0.self_attn.q_proj.weight");
  for (const std::int64_t count : {0, 1, 59, 60, 61, 300, 1000}) {
    for (const std::int64_t offset : {0, 1, 59, 777, 1400}) {
      std::vector<double> block(static_cast<std::size_t>(count));
      gradient.read(offset, count, block.data());
      for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(block[i], sample_value(3, offset + i));
    }
  }
  double one = 0;
  EXPECT_THAT(message_of<ConfigError>([&] { gradient.read(2400, 1, &one); }), HasSubstr("2400"));
}

TEST(Record, KeepsNonFiniteAndSubnormalValuesAsTheyAre) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  const std::vector<float> values{std::nanf(""), HUGE_VALF, -HUGE_VALF, -0.0F, std::numeric_limits<float>::denorm_min()};
  RecordWriter writer(path, sample_header());
  auto step = writer.begin_step(0);
  step.gradient("w", {5}, values.data());
  step.gradient("scalar", {}, values.data() + 4);
  step.gradient("empty", {0, 3}, values.data());
  step.memory({{"peak_bytes", 1}});
  step.timing({{"total", 1}});
  step.commit();
  writer.close();
  const RecordReader record(path);
  std::vector<double> read(5);
  record.gradient(0, "w").read(0, 5, read.data());
  EXPECT_TRUE(std::isnan(read[0]));
  EXPECT_EQ(read[1], HUGE_VAL);
  EXPECT_EQ(read[2], -HUGE_VAL);
  EXPECT_TRUE(std::signbit(read[3]));
  EXPECT_EQ(read[4], static_cast<double>(std::numeric_limits<float>::denorm_min()));
  record.gradient(0, "scalar").read(0, 1, read.data());
  EXPECT_EQ(read[0], static_cast<double>(std::numeric_limits<float>::denorm_min()));
  EXPECT_EQ(record.gradient(0, "empty").info().elements, 0);
}

TEST(Record, HoldsAConfigLongerThanAnOldAttribute) {
  const TemporaryFolder folder;
  auto header = sample_header();
  header.config_yaml = std::string(200'000, 'x');
  RecordWriter writer(folder.file("r.h5"), header);
  writer.close();
  EXPECT_EQ(RecordReader(folder.file("r.h5")).header().config_yaml, header.config_yaml);
}

TEST(Record, ManyStepsAndRewardRowsReadBack) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  RecordWriter writer(path, sample_header(), {.durable = false});
  constexpr std::int64_t kSteps = 300;
  for (std::int64_t step = 0; step < kSteps; ++step) write_sample_step(writer, step);
  writer.close();
  EXPECT_EQ(RecordReader(path).steps().size(), static_cast<std::size_t>(kSteps));
  for (const std::int64_t step : {0, 150, 299}) EXPECT_NO_THROW(check_sample_step(path, step));
}

TEST(Record, ADroppedStepLeavesNothing) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  RecordWriter writer(path, sample_header());
  write_sample_step(writer, 0);
  {
    auto step = writer.begin_step(1);
    const std::vector<double> data(100'000, 1.0);
    step.gradient("w", {100'000}, data.data());
  }
  write_sample_step(writer, 1);
  writer.close();
  EXPECT_NO_THROW(check_sample_step(path, 0));
  EXPECT_NO_THROW(check_sample_step(path, 1));
}

TEST(Record, AWriterWithoutCommitLeavesNoFile) {
  const TemporaryFolder folder;
  { RecordWriter writer(folder.file("r.h5"), sample_header()); }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Record, ARecordThatWasNotClosedSaysSo) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  {
    RecordWriter writer(path, sample_header());
    write_sample_step(writer, 0);
  }
  EXPECT_FALSE(RecordReader(path).closed());
  EXPECT_NO_THROW(check_sample_step(path, 0));
}

TEST(Record, RefusesWrongUseByName) {
  const TemporaryFolder folder;
  RecordWriter writer(folder.file("r.h5"), sample_header());
  const float one = 1;
  {
    auto step = writer.begin_step(0);
    step.gradient("w", {1}, &one);
    EXPECT_THAT(message_of<ConfigError>([&] { step.gradient("w", {1}, &one); }),
                HasSubstr("/steps/000000/gradients/w: given twice"));
    EXPECT_THAT(message_of<ConfigError>([&] { step.gradient("a/b", {1}, &one); }), HasSubstr("a/b"));
    EXPECT_THAT(message_of<ConfigError>([&] { step.memory({{"state", 1}}); }), HasSubstr("peak_bytes"));
    EXPECT_THAT(message_of<ConfigError>([&] { step.timing({{"capture", 1}}); }), HasSubstr("total"));
    EXPECT_THAT(message_of<ConfigError>([&] { step.commit(); }), HasSubstr("/memory: missing"));
    ResponseRecord short_mask = sample_responses(0)[0];
    short_mask.mask.pop_back();
    EXPECT_THAT(message_of<ConfigError>([&] { step.response(short_mask); }), HasSubstr("mask has 1 entries, expected 2"));
    EXPECT_THAT(message_of<ConfigError>([&] { writer.begin_step(1); }), HasSubstr("step 1 begins before"));
  }
  write_sample_step(writer, 0);
  EXPECT_THAT(message_of<ConfigError>([&] { writer.begin_step(0); }), HasSubstr("exists already"));
  auto header = sample_header();
  header.extra["arm"] = "twice";
  EXPECT_THAT(message_of<ConfigError>([&] { RecordWriter other(folder.file("s.h5"), header); }), HasSubstr("attribute arm"));
}

TEST(Record, KeepsTracesAndChecks) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  auto responses = sample_responses(0);
  for (auto& r : responses) {
    r.trace["0000.embedding"] = std::vector<double>(r.tokens.size(), 0.25 * static_cast<double>(r.member));
    r.trace["0001.keys"] = std::vector<double>(r.tokens.size(), 7);
  }
  {
    RecordWriter writer(path, sample_header(), {.durable = false});
    auto step = writer.begin_step(0);
    for (const auto& r : responses) step.response(r);
    step.memory({{"peak_bytes", 1}});
    step.timing({{"total", 1}});
    step.checks({{"changed_choices", 3}});
    EXPECT_THROW(step.checks({}), ConfigError);
    step.commit();
    write_sample_step(writer, 1);
    writer.close();
  }
  const RecordReader reader(path);
  EXPECT_EQ(reader.responses(0), responses);
  EXPECT_EQ(reader.checks(0), (std::map<std::string, std::int64_t>{{"changed_choices", 3}}));
  EXPECT_TRUE(reader.checks(1).empty());
}

TEST(Record, RefusesTracesThatDoNotFit) {
  const TemporaryFolder folder;
  RecordWriter writer(folder.file("r.h5"), sample_header(), {.durable = false});
  auto step = writer.begin_step(0);
  auto r = sample_responses(0)[0];
  r.trace["0000.embedding"] = {};
  EXPECT_THAT(message_of<ConfigError>([&] { step.response(r); }), HasSubstr("trace/0000.embedding has 0 entries, expected 2"));
  r.trace = {{"a/b", std::vector<double>(r.tokens.size())}};
  EXPECT_THAT(message_of<ConfigError>([&] { step.response(r); }), HasSubstr("'a/b' is no name"));
  r.trace = {{"0000.embedding", std::vector<double>(r.tokens.size())}};
  step.response(r);
  step.response(sample_responses(0)[1]);
  step.memory({{"peak_bytes", 1}});
  step.timing({{"total", 1}});
  EXPECT_THAT(message_of<ConfigError>([&] { step.commit(); }), HasSubstr("has other points than the first"));
}

TEST(Record, DoesNotTouchAnExistingFileUnlessAsked) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  {
    RecordWriter writer(path, sample_header());
    write_sample_step(writer, 0);
    writer.close();
  }
  EXPECT_THAT(message_of<IoError>([&] { RecordWriter again(path, sample_header()); }), HasSubstr("exists already"));
  {
    RecordWriter replacing(path, sample_header(), {.replace = true});
    EXPECT_NO_THROW(check_sample_step(path, 0));  // the old one stays until the first commit
    write_sample_step(replacing, 5);
    replacing.close();
  }
  EXPECT_THAT(RecordReader(path).steps(), ElementsAre(5));
}

TEST(Record, TwoWritersDoNotMeet) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  RecordWriter first(path, sample_header());
  EXPECT_THAT(message_of<IoError>([&] { RecordWriter second(path, sample_header()); }), HasSubstr("another process is writing"));
  write_sample_step(first, 0);
  EXPECT_THAT(message_of<IoError>([&] { RecordWriter second(path, sample_header(), {.replace = true}); }),
              HasSubstr("another process is writing it"));
}

TEST(Record, RefusesAFolderThatIsNotThere) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of<IoError>([&] { RecordWriter writer(folder.file("no/such/r.h5"), sample_header()); }),
              HasSubstr("No such file or directory"));
  EXPECT_THAT(message_of<IoError>([&] { RecordWriter writer("/proc/r.h5", sample_header()); }), HasSubstr("can't create"));
}

TEST(Record, AFullDiskIsAnErrorAndKeepsTheEarlierSteps) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  std::string message;
  {
    RecordWriter writer(path, sample_header());
    write_sample_step(writer, 0);
    const rlimit limit{.rlim_cur = 300'000, .rlim_max = before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
    message = message_of<IoError>([&] {
      for (std::int64_t step = 1; step < 100; ++step) write_sample_step(writer, step);
    });
    EXPECT_THROW(write_sample_step(writer, 200), IoError);
    EXPECT_THROW(writer.close(), IoError);
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(message, HasSubstr("File too large"));
  const RecordReader record(path);
  EXPECT_FALSE(record.closed());
  ASSERT_GE(record.steps().size(), 2U);
  for (const std::int64_t step : record.steps()) EXPECT_NO_THROW(check_sample_step(path, step));
}

TEST(Record, DescribesItselfWithoutElements) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  RecordWriter writer(path, sample_header());
  write_sample_step(writer, 4);
  writer.close();
  const auto json = describe(path);
  EXPECT_EQ(json["format"], "longstraw-record");
  EXPECT_EQ(json["header"]["arm"], "exact");
  EXPECT_EQ(json["steps"][0]["step"], 4);
  EXPECT_EQ(json["steps"][0]["gradients"][0]["shape"], nlohmann::json({40, 60}));
  EXPECT_EQ(json["steps"][0]["gradient_elements"], 2464);
  EXPECT_EQ(json["steps"][0]["responses"], 3);
  EXPECT_EQ(json["reward_rows"], 2);
}

}  // namespace
}  // namespace longstraw::core::record
