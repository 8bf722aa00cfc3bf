// Bad files are refused with a message that names the file and the place; records by other tools are read.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hdf5.h>

#include <filesystem>
#include <fstream>

#include "core/base/errors.h"
#include "core/record/reader.h"
#include "core/record/writer.h"
#include "tests/record/sample_record.h"

namespace longstraw::core::record {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refusal(const std::string& path) {
  try {
    const RecordReader record(path);
  } catch (const FormatError& error) {
    return error.what();
  }
  return "(accepted)";
}

std::string closed_sample(const TemporaryFolder& folder) {
  const auto path = folder.file("sample.h5");
  RecordWriter writer(path, sample_header());
  write_sample_step(writer, 0);
  write_sample_step(writer, 1);
  writer.close();
  return path;
}

// Changes an open record the way another tool might.
template <class F>
void edit(const std::string& path, F change) {
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
  ASSERT_GE(file, 0);
  change(file);
  H5Fclose(file);
}

void set_int(hid_t object, const char* name, long long value) {
  H5Adelete(object, name);
  const hid_t space = H5Screate(H5S_SCALAR);
  const hid_t attribute = H5Acreate2(object, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
  H5Awrite(attribute, H5T_NATIVE_LLONG, &value);
  H5Aclose(attribute);
  H5Sclose(space);
}

TEST(Reader, RefusesWhatIsNoRecord) {
  const TemporaryFolder folder;
  EXPECT_THAT(refusal(folder.file("none.h5")), AllOf(HasSubstr("none.h5"), HasSubstr("no such file")));
  EXPECT_THAT(refusal(folder.path().string()), HasSubstr("is no file"));
  std::ofstream(folder.file("text.h5")) << "not a record";
  EXPECT_THAT(refusal(folder.file("text.h5")), HasSubstr("is no HDF5 file"));
  std::ofstream(folder.file("empty.h5")).close();
  EXPECT_THAT(refusal(folder.file("empty.h5")), HasSubstr("is no HDF5 file"));
  H5Fclose(H5Fcreate(folder.file("foreign.h5").c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT));
  EXPECT_THAT(refusal(folder.file("foreign.h5")), HasSubstr("is an HDF5 file but no record"));
}

TEST(Reader, RefusesATruncatedFileOfAnyLength) {
  const TemporaryFolder folder;
  const auto path = closed_sample(folder);
  const auto size = std::filesystem::file_size(path);
  for (std::uintmax_t length = 0; length < size; length += 1 + size / 97) {
    const auto cut = folder.file("cut.h5");
    std::filesystem::copy_file(path, cut, std::filesystem::copy_options::overwrite_existing);
    std::filesystem::resize_file(cut, length);
    EXPECT_THAT(refusal(cut), HasSubstr("cut.h5")) << length << " of " << size;
  }
}

TEST(Reader, DamagedBytesNeverCrashIt) {
  const TemporaryFolder folder;
  const auto path = closed_sample(folder);
  std::ifstream in(path, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  std::uint64_t random = 20260714;
  int refused = 0;
  for (int trial = 0; trial < 200; ++trial) {
    std::string bytes = whole;
    for (int i = 0; i < 8; ++i) {
      random = random * 6364136223846793005ULL + 1442695040888963407ULL;
      bytes[(random >> 20) % bytes.size()] = static_cast<char>(random >> 56);
    }
    const auto damaged = folder.file("damaged.h5");
    std::ofstream(damaged, std::ios::binary) << bytes;
    try {
      check_sample_step(damaged, 0);
      check_sample_step(damaged, 1);
    } catch (const FormatError&) {
      ++refused;
    } catch (const std::exception&) {
      // Values that changed: a record does not carry checksums of its elements.
    }
  }
  EXPECT_GT(refused, 0);
}

TEST(Reader, RefusesANewerFormatVersion) {
  const TemporaryFolder folder;
  const auto path = closed_sample(folder);
  edit(path, [](hid_t file) { set_int(file, "format_version", 2); });
  EXPECT_THAT(refusal(path), HasSubstr("format_version 2, this program reads up to 1"));
}

TEST(Reader, NamesAMissingAttribute) {
  for (const char* name : {"arm", "config", "model_sha256", "data_sha256", "dtype", "device", "world_size", "seed", "torch_version",
                           "git_commit", "deterministic", "closed", "format_version"}) {
    const TemporaryFolder folder;
    const auto path = closed_sample(folder);
    edit(path, [&](hid_t file) { H5Adelete(file, name); });
    EXPECT_THAT(refusal(path), AllOf(HasSubstr(path), HasSubstr(std::string("attribute ") + name + ": missing")));
  }
}

TEST(Reader, NamesAnAttributeOfTheWrongKind) {
  const TemporaryFolder folder;
  const auto path = closed_sample(folder);
  edit(path, [](hid_t file) { set_int(file, "dtype", 5); });
  EXPECT_THAT(refusal(path), HasSubstr("attribute dtype: expected one text"));
}

TEST(Reader, NamesArraysThatDoNotFitTogether) {
  const TemporaryFolder folder;
  const auto path = closed_sample(folder);
  edit(path, [](hid_t file) { H5Ldelete(file, "/steps/000001/responses/tokens", H5P_DEFAULT); });
  const RecordReader record(path);
  EXPECT_NO_THROW(record.responses(0));
  try {
    record.responses(1);
    FAIL() << "accepted";
  } catch (const FormatError& error) {
    EXPECT_THAT(error.what(), HasSubstr("/steps/000001/responses/tokens: missing"));
  }
}

TEST(Reader, RefusesARecordThatIsBeingWritten) {
  const TemporaryFolder folder;
  const auto path = folder.file("r.h5");
  RecordWriter writer(path, sample_header());
  write_sample_step(writer, 0);
  EXPECT_THAT(refusal(path), HasSubstr("is being written by another process"));
  writer.close();
  EXPECT_NO_THROW(check_sample_step(path, 0));
}

TEST(Reader, ReadsAsciiTextOfOtherTools) {
  const TemporaryFolder folder;
  const auto path = closed_sample(folder);
  edit(path, [&](hid_t file) {
    const char* name = "/steps/000000/responses/prompt_id";
    H5Ldelete(file, name, H5P_DEFAULT);
    const hsize_t count = sample_responses(0).size();
    const std::vector<char> text(count * 3, 'q');
    const hid_t space = H5Screate_simple(1, &count, nullptr), type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, 3);
    H5Tset_strpad(type, H5T_STR_NULLPAD);
    const hid_t dataset = H5Dcreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, text.data());
    H5Dclose(dataset);
    H5Tclose(type);
    H5Sclose(space);
  });
  for (const auto& response : RecordReader(path).responses(0)) EXPECT_EQ(response.prompt_id, "qqq");
}

TEST(Reader, ReadsChunkedAndCompressedGradientsOfOtherTools) {
  const TemporaryFolder folder;
  const auto path = closed_sample(folder);
  constexpr hsize_t kDims[2] = {7, 11}, kChunk[2] = {3, 4};
  std::vector<double> values(77);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.5 * static_cast<double>(i);
  edit(path, [&](hid_t file) {
    const hid_t space = H5Screate_simple(2, kDims, nullptr);
    const hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(creation, 2, kChunk);
    H5Pset_deflate(creation, 4);
    const hid_t dataset =
        H5Dcreate2(file, "/steps/000000/gradients/chunked", H5T_IEEE_F32BE, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    H5Dwrite(dataset, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data());
    H5Dclose(dataset);
    H5Pclose(creation);
    H5Sclose(space);
  });
  const RecordReader record(path);
  const auto gradient = record.gradient(0, "chunked");
  EXPECT_EQ(gradient.info().dtype, "float32");
  for (std::int64_t offset = 0; offset <= 70; ++offset) {
    std::vector<double> block(7);
    gradient.read(offset, 7, block.data());
    for (int i = 0; i < 7; ++i) ASSERT_EQ(block[i], values[offset + i]);
  }
}

}  // namespace
}  // namespace longstraw::core::record
