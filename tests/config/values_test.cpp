// The small readers and writers under the configuration: sizes, numbers, texts, nearest words.

#include "core/config/bytes.h"
#include "core/config/nearest.h"
#include "core/config/value.h"

#include <gtest/gtest.h>

#include <limits>

namespace longstraw::core::config {
namespace {

TEST(Bytes, reads_what_people_write) {
  const std::vector<std::pair<std::string, std::int64_t>> cases = {
      {"0", 0},
      {"512", 512},
      {"512B", 512},
      {"8GiB", 8LL << 30},
      {"8 GiB", 8LL << 30},
      {"512MiB", 512LL << 20},
      {"1e9", 1'000'000'000},
      {"1.5GiB", 3LL << 29},
      {"2kB", 2000},
      {"2KB", 2000},
      {"3GB", 3'000'000'000},
      {"4G", 4LL << 30},
      {"1T", 1LL << 40},
      {"0.1GiB", 107'374'182},
      {"9223372036854775807", std::numeric_limits<std::int64_t>::max()},
  };
  for (const auto& [text, count] : cases) {
    ASSERT_TRUE(parse_bytes(text)) << text;
    EXPECT_EQ(parse_bytes(text)->count, count) << text;
  }
}

TEST(Bytes, refuses_everything_else) {
  for (const char* text : {"", "GiB", "-1", "-1GiB", "8gib", "8 GiB 3", "nan", "inf", "1e99", "8388608TiB", "9223372036854775808",
                           "0x10", "1,5GiB", "8GiBs"}) {
    EXPECT_FALSE(parse_bytes(text)) << text;
  }
}

TEST(Bytes, writes_the_shortest_exact_form) {
  EXPECT_EQ(to_string(Bytes{8LL << 30}), "8GiB");
  EXPECT_EQ(to_string(Bytes{3LL << 29}), "1536MiB");
  EXPECT_EQ(to_string(Bytes{1000}), "1000");
  EXPECT_EQ(to_string(Bytes{0}), "0");
}

TEST(Numbers, are_read_exactly_or_not_at_all) {
  EXPECT_EQ(parse_int("+5"), 5);
  EXPECT_EQ(parse_int("-9223372036854775808"), std::numeric_limits<std::int64_t>::min());
  for (const char* text : {"", "+", "++5", "+-5", "5.0", "1e3", "0x5", " 5", "5 ", "9223372036854775808"}) {
    EXPECT_FALSE(parse_int(text)) << text;
  }
  EXPECT_EQ(parse_uint("18446744073709551615"), std::numeric_limits<std::uint64_t>::max());
  EXPECT_FALSE(parse_uint("-1"));
  EXPECT_EQ(parse_double("1e-4"), 1e-4);
  for (const char* text : {"", "nan", "inf", "-inf", ".inf", "1e999", "1.0x"}) EXPECT_FALSE(parse_double(text)) << text;
  EXPECT_EQ(parse_bool("true"), true);
  EXPECT_FALSE(parse_bool("yes"));
}

TEST(Numbers, doubles_are_written_as_no_yaml_reader_takes_for_something_else) {
  EXPECT_EQ(write_double(1.0), "1.0");
  EXPECT_EQ(write_double(0.2), "0.2");
  EXPECT_EQ(write_double(1e-6), "1.0e-06");
  EXPECT_EQ(write_double(-1e300), "-1.0e+300");
}

TEST(Texts, are_quoted_where_they_could_be_taken_for_something_else) {
  for (const char* text : {"grpo", "a/b.jsonl", "./run", "../x", "/abs/path", "rewards.py:function", "SmolLM2-135M"}) {
    EXPECT_EQ(write_text(text), text);
  }
  for (const char* text : {"",   "null", "True", "off", "8",    "1e3",   "1:30",        "~",           "a b", "a: b", "- a",
                           "#x", "x #y", "[a]",  "a:",  ".inf", "\"q\"", "back\\slash", "line\nbreak", "*a",  "&a",   "!a"}) {
    EXPECT_EQ(write_text(text).front(), '"') << text;
  }
}

TEST(Nearest, finds_slips_of_the_pen_and_nothing_else) {
  const std::vector<std::string> keys = {"prompt_ids", "completion_ids", "old_logprobs", "ref_logprobs", "reward"};
  EXPECT_EQ(nearest("old_logprob", keys), "old_logprobs");
  EXPECT_EQ(nearest("Old-LogProbs", keys), "old_logprobs");
  EXPECT_EQ(nearest("rewrad", keys), "reward");
  EXPECT_EQ(nearest("answer", keys), std::nullopt);
  EXPECT_EQ(nearest("", keys), std::nullopt);
  EXPECT_EQ(nearest(std::string(100'000, 'x'), keys), std::nullopt);
}

TEST(Nearest, distance_counts_single_edits) {
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("lsos", "loss"), 1u);  // two neighbours swapped
  EXPECT_EQ(edit_distance("abc", "abc"), 0u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
}

}  // namespace
}  // namespace longstraw::core::config
