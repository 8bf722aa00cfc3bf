#pragma once
// How a gradient's elements are read, behind GradientReader.

#include "core/record/hdf5.h"
#include "core/record/reader.h"

namespace longstraw::core::record {

struct GradientReader::State {
  // `fd` is the record's file, open for reading, and outlives this object.
  State(hid_t gradients, const std::string& name, int fd, const std::string& where);

  void read(std::int64_t offset, std::int64_t count, double* out);

  GradientInfo info;

 private:
  void read_bytes(std::int64_t offset, std::int64_t count, double* out) const;
  void read_rows(std::int64_t offset, std::int64_t count, double* out);

  std::string place_;
  hdf5::Handle dataset_;
  int fd_;
  std::int64_t file_offset_ = -1;  // of the elements, when they lie in the file as they lie in memory
  std::vector<double> rows_;       // otherwise: the rows last read
  std::int64_t first_row_ = 0;
};

GradientInfo gradient_info(hid_t dataset, const std::string& name, const std::string& place);

}  // namespace longstraw::core::record
