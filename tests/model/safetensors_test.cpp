// Every lie that a safetensors file can tell is caught and named, and what is written can be read.
#include "core/model/safetensors.h"

#include "core/base/errors.h"
#include "tests/support/fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <limits>
#include <sys/resource.h>

namespace longstraw::core::model {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Property;
using testing::Throws;

std::span<const std::byte> bytes_of(const auto& values) { return std::as_bytes(std::span(values)); }

void write_file(const std::filesystem::path& path, const std::string& header, const std::string& data,
                std::optional<uint64_t> length = {}) {
  std::ofstream stream(path, std::ios::binary);
  const uint64_t n = length.value_or(header.size());
  stream.write(reinterpret_cast<const char*>(&n), sizeof(n));
  stream << header << data;
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

class Safetensors : public testing::Test {
 protected:
  // The file with this header and data is refused, in a message that has the file's name and `words`.
  void expect_refused(const std::string& header, const std::string& data, const std::vector<std::string>& words,
                      std::optional<uint64_t> length = {}) {
    SCOPED_TRACE(header);
    write_file(path_, header, data, length);
    try {
      const SafetensorsFile file(path_);
      FAIL() << "was accepted";
    } catch (const FormatError& error) {
      EXPECT_THAT(error.what(), HasSubstr(path_.string()));
      for (const auto& word : words) EXPECT_THAT(error.what(), HasSubstr(word));
    }
  }
  test::TemporaryFolder folder_;
  std::filesystem::path path_ = folder_.path() / "model.safetensors";
};

TEST_F(Safetensors, ReadsWhatTheFormatAllows) {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]},)"
      R"("a":{"dtype":"U8","shape":[3,1],"data_offsets":[0,3]},"e":{"dtype":"F32","shape":[0,4],"data_offsets":[11,11]}}   )";
  const float values[] = {1.5f, -2.0f};
  std::string data = "xyz";
  data.append(reinterpret_cast<const char*>(values), sizeof(values));
  write_file(path_, header, data);
  const SafetensorsFile file(path_);
  ASSERT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(file.tensors()[0].name, "a");
  EXPECT_EQ(file.tensors()[0].shape, (Shape{3, 1}));
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(std::memcmp(file.find("b")->bytes.data(), values, sizeof(values)), 0);
  EXPECT_EQ(file.find("e")->bytes.size(), 0u);
  EXPECT_EQ(file.find("c"), nullptr);
}

TEST_F(Safetensors, RefusesAFileThatIsNone) {
  expect_refused("{}", "", {"longer than the file"}, 1u << 20);
  expect_refused("{}", "", {"longer than the file"}, std::numeric_limits<uint64_t>::max());
  expect_refused("{\"a\":", "", {"not JSON"});
  expect_refused("[1]", "", {"not a JSON object"});
  expect_refused("{}", "left over", {"9 bytes after the last tensor"});
  expect_refused(std::string(100000, '['), "", {"not JSON"});
  std::ofstream(path_, std::ios::trunc) << "abc";
  EXPECT_THAT([&] { SafetensorsFile{path_}; }, Throws<FormatError>(Property(&FormatError::what, HasSubstr("3 bytes"))));
  std::ofstream(path_, std::ios::trunc) << "";
  EXPECT_THROW(SafetensorsFile{path_}, FormatError);
  EXPECT_THAT([&] { SafetensorsFile{folder_.path() / "absent"}; },
              Throws<FormatError>(Property(&FormatError::what, HasSubstr("absent"))));
  EXPECT_THROW(SafetensorsFile{folder_.path()}, FormatError);
}

TEST_F(Safetensors, RefusesALyingEntryAndNamesIt) {
  const auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"w":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  const std::string four(4, '\0'), eight(8, '\0');
  expect_refused(entry("\"F33\"", "[1]", "[0,4]"), four, {"tensor w", "F33", "BF16"});
  expect_refused(entry("7", "[1]", "[0,4]"), four, {"tensor w", "dtype"});
  expect_refused(entry("\"F32\"", "[2]", "[0,4]"), four, {"tensor w", "4 bytes", "[2]", "wants 8"});
  expect_refused(entry("\"F32\"", "[1]", "[0,8]"), eight, {"tensor w", "8 bytes", "wants 4"});
  expect_refused(entry("\"F32\"", "[-1]", "[0,4]"), four, {"tensor w", "shape"});
  expect_refused(entry("\"F32\"", "[1.5]", "[0,4]"), four, {"tensor w", "shape"});
  expect_refused(entry("\"F32\"", "3", "[0,4]"), four, {"tensor w", "shape"});
  expect_refused(entry("\"F32\"", "[4294967296,4294967296,4294967296]", "[0,4]"), four, {"tensor w", "too large"});
  expect_refused(entry("\"F32\"", "[1]", "[4,0]"), four, {"tensor w", "end before begin"});
  expect_refused(entry("\"F32\"", "[1]", "[0]"), four, {"tensor w", "data_offsets"});
  expect_refused(entry("\"F32\"", "[1]", "[0,-4]"), four, {"tensor w", "data_offsets"});
  expect_refused(entry("\"F32\"", "[2]", "[0,8]"), four, {"tensor w", "truncated"});
  expect_refused(entry("\"F32\"", "[1]", "[4,8]"), eight, {"tensor w", "gap"});
  expect_refused(R"({"w":5})", "", {"tensor w"});
  expect_refused(R"({"w":{"shape":[1],"data_offsets":[0,4]}})", four, {"tensor w", "dtype"});
  expect_refused(R"({"__metadata__":{"a":1}})", "", {"__metadata__"});
}

TEST_F(Safetensors, RefusesOverlapsGapsAndDuplicates) {
  const std::string w = R"("w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  const std::string eight(8, '\0'), sixteen(16, '\0');
  expect_refused("{" + w + R"(,"v":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", sixteen, {"tensor v", "inside", "8"});
  expect_refused("{" + w + R"(,"v":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", eight, {"inside"});
  expect_refused("{" + w + R"(,"v":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})", sixteen, {"tensor v", "gap"});
  expect_refused("{" + w + "," + w + "}", eight, {"\"w\"", "twice"});
  expect_refused(R"({"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", eight, {"twice"});
}

// Whatever happens to a valid file's bytes, reading it ends in a value or a FormatError.
TEST(SafetensorsProperty, NoDamageToAFileIsMoreThanAFormatError) {
  const test::TemporaryFolder folder;
  const auto path = folder.path() / "m.safetensors";
  const std::vector<float> values(12, 1.0f);
  write_safetensors(path, {{"a", StoredDtype::kF32, {3, 2}, bytes_of(values).first(24)},
                           {"b", StoredDtype::kF32, {6}, bytes_of(values).last(24)}});
  const std::string whole = read_file(path);
  rc::check("damaged bytes", [&] {
    std::string damaged = whole;
    const auto hits = *rc::gen::inRange(1, 4);
    for (int i = 0; i < hits; ++i)
      damaged[size_t(*rc::gen::inRange<int>(0, int(damaged.size())))] = char(*rc::gen::inRange(0, 256));
    damaged.resize(size_t(*rc::gen::inRange<int>(0, int(damaged.size()) + 1)));
    std::ofstream(path, std::ios::binary | std::ios::trunc) << damaged;
    try {
      const SafetensorsFile file(path);
      for (const StoredTensor& tensor : file.tensors()) first_non_finite(tensor);
    } catch (const FormatError&) {
    }
  });
  rc::check("truncated anywhere is refused", [&] {
    const auto length = *rc::gen::inRange<int>(0, int(whole.size()));
    std::ofstream(path, std::ios::binary | std::ios::trunc) << whole.substr(0, size_t(length));
    RC_ASSERT_THROWS_AS(SafetensorsFile{path}, FormatError);
  });
}

TEST(SafetensorsProperty, WhatIsWrittenIsReadBack) {
  const test::TemporaryFolder folder;
  const auto path = folder.path() / "m.safetensors";
  rc::check("read(write(x)) = x", [&] {
    constexpr StoredDtype kDtypes[] = {StoredDtype::kF64,  StoredDtype::kF32, StoredDtype::kF16,
                                       StoredDtype::kBf16, StoredDtype::kI64, StoredDtype::kU8};
    const auto count = *rc::gen::inRange(0, 5);
    std::vector<std::vector<char>> contents;
    std::vector<StoredTensor> tensors;
    for (int i = 0; i < count; ++i) {
      const StoredDtype dtype = kDtypes[*rc::gen::inRange(0, 6)];
      const Shape shape = *rc::gen::container<Shape>(rc::gen::inRange<int64_t>(0, 4));
      const auto bytes = size_t(element_count(shape) * bytes_per_element(dtype));
      contents.push_back(*rc::gen::container<std::vector<char>>(bytes, rc::gen::arbitrary<char>()));
      tensors.push_back({"t\"é\n" + std::to_string(i), dtype, shape, {}});
    }
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i].bytes = bytes_of(contents[i]);
    write_safetensors(path, tensors, {{"format", "pt"}});
    const SafetensorsFile file(path);
    RC_ASSERT(file.tensors().size() == tensors.size());
    for (const StoredTensor& wanted : tensors) {
      const StoredTensor* got = file.find(wanted.name);
      RC_ASSERT(got != nullptr);
      RC_ASSERT(got->shape == wanted.shape);
      RC_ASSERT(got->dtype == wanted.dtype);
      RC_ASSERT(std::equal(got->bytes.begin(), got->bytes.end(), wanted.bytes.begin(), wanted.bytes.end()));
    }
  });
}

template <class T>
void expect_first_non_finite(StoredDtype dtype, T good, const std::vector<T>& bad) {
  for (const T value : bad) {
    for (const size_t where : {size_t(0), size_t(5), size_t(2047), size_t(2048), size_t(4999)}) {
      std::vector<T> values(5000, good);
      values[where] = value;
      EXPECT_EQ(first_non_finite({"w", dtype, {5000}, bytes_of(values)}), int64_t(where));
    }
  }
  EXPECT_EQ(first_non_finite({"w", dtype, {5000}, bytes_of(std::vector<T>(5000, good))}), -1);
}

TEST(SafetensorsValues, NanAndInfinityAreFoundInEveryDtype) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  expect_first_non_finite<float>(StoredDtype::kF32, std::numeric_limits<float>::max(), {inf, -inf, nan, -nan});
  expect_first_non_finite<double>(StoredDtype::kF64, std::numeric_limits<double>::lowest(),
                                  {double(inf), double(-inf), double(nan)});
  expect_first_non_finite<uint16_t>(StoredDtype::kF16, 0x7bff, {0x7c00, 0xfc00, 0x7e00, 0x7c01});
  expect_first_non_finite<uint16_t>(StoredDtype::kBf16, 0xff7f, {0x7f80, 0xff80, 0x7fc0, 0x7f81});
}

TEST_F(Safetensors, AFailedWriteLeavesWhatWasThere) {
  const std::vector<float> values(1 << 14, 1.0f);
  write_safetensors(path_, {{"a", StoredDtype::kF32, {1}, bytes_of(values).first(4)}});
  const std::string before = read_file(path_);
  // A limit on file size fails the write in the middle as a full disk does.
  rlimit old_limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit small{1000, old_limit.rlim_max};
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THAT(
      [&] {
        write_safetensors(path_, {{"a", StoredDtype::kF32, {1 << 14}, bytes_of(values)}});
      },
      Throws<IoError>(Property(&IoError::what, HasSubstr(path_.string()))));
  setrlimit(RLIMIT_FSIZE, &old_limit);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(read_file(path_), before);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_.path()), {}), 1) << "nothing is left beside it";

  EXPECT_THROW(write_safetensors(path_, {{"a", StoredDtype::kF32, {2}, bytes_of(values)}}), ConfigError);
  EXPECT_THROW(write_safetensors(folder_.path() / "no" / "folder", {}), IoError);
  EXPECT_EQ(read_file(path_), before);
}

}  // namespace
}  // namespace longstraw::core::model
