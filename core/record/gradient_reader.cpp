#include "core/record/gradient_reader.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <span>

#include "core/base/errors.h"

namespace longstraw::core::record {

using hdf5::Doing;
using hdf5::Handle;

namespace {

bool is_type(hid_t type, hid_t wanted) { return H5Tequal(type, wanted) > 0; }

// Where the elements of an uncompressed, contiguous dataset begin in the file; -1 when they do not lie there plainly.
// Reading them there saves HDF5's conversion through its own buffer, half of the time of a comparison.
std::int64_t plain_offset(hid_t dataset, const std::string& place) {
  if (std::endian::native != std::endian::little) return -1;
  const Handle type(H5Dget_type(dataset), &H5Tclose, Doing::kReading, place);
  if (!is_type(type.id(), H5T_IEEE_F32LE) && !is_type(type.id(), H5T_IEEE_F64LE)) return -1;
  const Handle creation(H5Dget_create_plist(dataset), &H5Pclose, Doing::kReading, place);
  if (H5Pget_layout(creation.id()) != H5D_CONTIGUOUS || H5Pget_external_count(creation.id()) != 0) return -1;
  const haddr_t offset = H5Dget_offset(dataset);
  return offset == HADDR_UNDEF ? -1 : static_cast<std::int64_t>(offset);
}

void read_exactly(int fd, void* out, std::size_t size, std::int64_t offset, const std::string& place) {
  auto* bytes = static_cast<char*>(out);
  while (size > 0) {
    const ssize_t done = ::pread(fd, bytes, size, offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw IoError(place + ": " + std::strerror(errno));
    if (done == 0) throw FormatError(place + ": the file ends too early");
    bytes += done;
    size -= static_cast<std::size_t>(done);
    offset += done;
  }
}

}  // namespace

GradientInfo gradient_info(hid_t dataset, const std::string& name, const std::string& place) {
  const Handle type(H5Dget_type(dataset), &H5Tclose, Doing::kReading, place);
  if (H5Tget_class(type.id()) != H5T_FLOAT) throw FormatError(place + ": expected float32 or float64 elements");
  GradientInfo info{.name = name,
                    .shape = hdf5::shape_of(dataset, place),
                    .dtype = H5Tget_size(type.id()) > sizeof(float) ? "float64" : "float32",
                    .elements = 1};
  for (const std::int64_t dim : info.shape) info.elements *= dim;
  return info;
}

GradientReader::State::State(hid_t gradients, const std::string& name, int fd, const std::string& where)
    : place_(where + "/" + name), fd_(fd) {
  if (!hdf5::exists(gradients, name)) throw FormatError(place_ + ": missing");
  dataset_ = Handle(H5Dopen2(gradients, name.c_str(), H5P_DEFAULT), &H5Dclose, Doing::kReading, place_);
  info = gradient_info(dataset_.id(), name, place_);
  file_offset_ = plain_offset(dataset_.id(), place_);
}

void GradientReader::State::read(std::int64_t offset, std::int64_t count, double* out) {
  if (offset < 0 || count < 0 || offset + count > info.elements) {
    throw ConfigError(fmt::format("{}: elements {} to {}, but it has {}", place_, offset, offset + count, info.elements));
  }
  if (count == 0) return;
  if (file_offset_ >= 0) {
    read_bytes(offset, count, out);
  } else {
    read_rows(offset, count, out);
  }
}

void GradientReader::State::read_bytes(std::int64_t offset, std::int64_t count, double* out) const {
  const auto elements = static_cast<std::size_t>(count);
  if (info.dtype == "float64") {
    read_exactly(fd_, out, elements * sizeof(double), file_offset_ + offset * static_cast<std::int64_t>(sizeof(double)), place_);
    return;
  }
  // The floats go into the second half of the output and are widened from the front: element i is read before the write
  // that would overwrite it.
  auto* floats = reinterpret_cast<char*>(out) + elements * sizeof(float);
  read_exactly(fd_, floats, elements * sizeof(float), file_offset_ + offset * static_cast<std::int64_t>(sizeof(float)), place_);
  constexpr std::size_t kBatch = 256;
  float batch[kBatch];
  for (std::size_t i = 0; i < elements; i += kBatch) {
    const std::size_t n = std::min(kBatch, elements - i);
    std::memcpy(batch, floats + i * sizeof(float), n * sizeof(float));
    for (std::size_t k = 0; k < n; ++k) out[i + k] = static_cast<double>(batch[k]);
  }
}

// Chunked or compressed data (written by other tools): whole rows of the first dim, so that any selection is a box.
void GradientReader::State::read_rows(std::int64_t offset, std::int64_t count, double* out) {
  if (info.shape.empty()) {
    hdf5::check(H5Dread(dataset_.id(), H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, out), Doing::kReading, place_);
    return;
  }
  const std::int64_t row = info.elements / info.shape[0];
  const std::int64_t first = offset / row;
  const std::int64_t last = (offset + count + row - 1) / row;
  std::vector<hsize_t> start(info.shape.size(), 0);
  std::vector<hsize_t> extent(info.shape.begin(), info.shape.end());
  start[0] = static_cast<hsize_t>(first);
  extent[0] = static_cast<hsize_t>(last - first);
  const bool held = first >= first_row_ && last <= first_row_ + static_cast<std::int64_t>(rows_.size()) / row;
  if (!held) {
    rows_.resize(static_cast<std::size_t>((last - first) * row));
    first_row_ = first;
    const Handle file_space(H5Dget_space(dataset_.id()), &H5Sclose, Doing::kReading, place_);
    hdf5::check(H5Sselect_hyperslab(file_space.id(), H5S_SELECT_SET, start.data(), nullptr, extent.data(), nullptr),
                Doing::kReading, place_);
    const Handle memory_space(H5Screate_simple(static_cast<int>(extent.size()), extent.data(), nullptr), &H5Sclose, Doing::kReading,
                              place_);
    hdf5::check(H5Dread(dataset_.id(), H5T_NATIVE_DOUBLE, memory_space.id(), file_space.id(), H5P_DEFAULT, rows_.data()),
                Doing::kReading, place_);
  }
  const double* from = rows_.data() + (offset - first_row_ * row);
  std::copy(from, from + count, out);
}

GradientReader::GradientReader(std::unique_ptr<State> state) : state_(std::move(state)) {}
GradientReader::GradientReader(GradientReader&&) noexcept = default;
GradientReader::~GradientReader() = default;
const GradientInfo& GradientReader::info() const { return state_->info; }
void GradientReader::read(std::int64_t offset, std::int64_t count, double* out) const { state_->read(offset, count, out); }

}  // namespace longstraw::core::record
