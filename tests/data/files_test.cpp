// Files that appear whole or not at all, hashes of files, and long lines.

#include "core/base/atomic_file.h"
#include "core/base/sha256.h"
#include "core/data/json_lines.h"
#include "core/data/rollouts.h"
#include "tests/data/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <iterator>
#include <limits>

namespace longstraw::core::data {
namespace {

using testing::HasSubstr;
using testing_support::message_of;
using testing_support::Scratch;

std::string content_of(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::size_t files_in(const std::filesystem::path& folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

Batch small_batch() {
  Response response;
  response.completion_ids = {3};
  response.reward = 1.0;
  return {{"q", {1, 2}, {response}}};
}

TEST(AtomicFiles, replace_what_was_there_only_when_committed) {
  const Scratch scratch;
  const auto path = scratch.file("a.txt", "before");
  {
    AtomicFile file(path);
    file.write("half");
  }
  EXPECT_EQ(content_of(path), "before");
  EXPECT_EQ(files_in(scratch.path("")), 1u);
  AtomicFile file(path);
  file.write("af");
  file.write("ter");
  EXPECT_EQ(content_of(path), "before");
  file.commit();
  EXPECT_EQ(content_of(path), "after");
  EXPECT_EQ(files_in(scratch.path("")), 1u);
}

TEST(AtomicFiles, a_link_stays_a_link) {
  const Scratch scratch;
  const auto target = scratch.file("target", "old");
  std::filesystem::create_symlink("target", scratch.path("link"));
  AtomicFile file(scratch.path("link"));
  file.write("new");
  file.commit();
  EXPECT_TRUE(std::filesystem::is_symlink(scratch.path("link")));
  EXPECT_EQ(content_of(target), "new");
}

TEST(AtomicFiles, an_unwritable_place_is_named) {
  const Scratch scratch;
  EXPECT_EQ(message_of<IoError>([&] { write_rollouts(scratch.path("no/such/r.jsonl"), small_batch()); }),
            "no/such/r.jsonl: can't be written: No such file or directory");
  EXPECT_THAT(message_of<IoError>([&] { write_rollouts(scratch.path(""), small_batch()); }), HasSubstr("is a folder"));
  EXPECT_THAT(message_of<IoError>([&] { write_rollouts("/dev/full", small_batch()); }),
              HasSubstr("/dev/full: writing failed: No space left on device"));
}

TEST(AtomicFiles, a_disk_that_fills_up_leaves_the_old_file_and_nothing_else) {
  const Scratch scratch;
  const auto path = scratch.file("r.jsonl", "old");
  Batch batch = small_batch();
  batch[0].prompt_ids.assign(100'000, 12345);
  // A limit on the size of files is the nearest to a full disk that a test can make; without the signal, write() fails.
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limited{4096, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &limited);
  const std::string message = message_of<IoError>([&] { write_rollouts(path, batch); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(message, "r.jsonl: writing failed: File too large");
  EXPECT_EQ(content_of(path), "old");
  EXPECT_EQ(files_in(scratch.path("")), 1u);
}

TEST(AtomicFiles, a_batch_that_cannot_be_written_as_json_leaves_the_old_file) {
  const Scratch scratch;
  const auto path = scratch.file("r.jsonl", "old");
  Batch batch = small_batch();
  batch[0].responses[0].reward = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(message_of<FormatError>([&] { write_rollouts(path, batch); }),
            "reward of a response to prompt_id q: got nan, wanted a finite number");
  EXPECT_EQ(content_of(path), "old");
}

// Values of FIPS 180-2 and of the empty message.
TEST(Sha256Of, the_published_examples) {
  Sha256 sha;
  EXPECT_EQ(sha.hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  sha.update("a");
  sha.update("bc");
  EXPECT_EQ(sha.hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const Scratch scratch;
  EXPECT_EQ(sha256_of_file(scratch.file("m", std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_THAT(message_of<FormatError>([&] { sha256_of_file(scratch.path("none")); }),
              HasSubstr("can't be read: No such file or directory"));
  EXPECT_THAT(message_of<IoError>([&] { sha256_of_file(scratch.path("")); }), HasSubstr("reading failed: Is a directory"));
}

TEST(Lines, longer_than_the_buffer_and_without_an_end_are_read_whole) {
  const Scratch scratch;
  const std::string first(3'000'000, 'a'), second(1 << 20, 'b');
  LineReader reader(scratch.file("l", first + "\n\n" + second));
  std::string line;
  ASSERT_TRUE(reader.next(line));
  EXPECT_EQ(line, first);
  EXPECT_EQ(reader.place().line, 1);
  ASSERT_TRUE(reader.next(line));
  EXPECT_EQ(line, second);
  EXPECT_EQ(reader.place().line, 3);
  EXPECT_FALSE(reader.next(line));
}

}  // namespace
}  // namespace longstraw::core::data
