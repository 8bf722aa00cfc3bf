#include "core/record/columns.h"

namespace longstraw::core::record {

using hdf5::Doing;
using hdf5::Handle;

namespace {

constexpr hsize_t kRowsPerChunk = 1024;

}  // namespace

void create_column(hid_t group, const std::string& name, hid_t type, const void* fill, const std::string& where) {
  const std::string place = where + "/" + name;
  const hsize_t none = 0, unlimited = H5S_UNLIMITED, chunk = kRowsPerChunk;
  const Handle space(H5Screate_simple(1, &none, &unlimited), &H5Sclose, Doing::kWriting, place);
  const Handle creation(H5Pcreate(H5P_DATASET_CREATE), &H5Pclose, Doing::kWriting, place);
  hdf5::check(H5Pset_chunk(creation.id(), 1, &chunk), Doing::kWriting, place);
  if (fill != nullptr) hdf5::check(H5Pset_fill_value(creation.id(), type, fill), Doing::kWriting, place);
  const Handle dataset(H5Dcreate2(group, name.c_str(), type, space.id(), H5P_DEFAULT, creation.id(), H5P_DEFAULT), &H5Dclose,
                       Doing::kWriting, place);
}

void append_values(hid_t group, const std::string& name, hsize_t old_count, hsize_t added, hid_t memory_type, const void* values,
                   const std::string& where) {
  const std::string place = where + "/" + name;
  const Handle dataset(H5Dopen2(group, name.c_str(), H5P_DEFAULT), &H5Dclose, Doing::kWriting, place);
  const hsize_t count = old_count + added;
  hdf5::check(H5Dset_extent(dataset.id(), &count), Doing::kWriting, place);
  const Handle file_space(H5Dget_space(dataset.id()), &H5Sclose, Doing::kWriting, place);
  hdf5::check(H5Sselect_hyperslab(file_space.id(), H5S_SELECT_SET, &old_count, nullptr, &added, nullptr), Doing::kWriting, place);
  const Handle memory_space(H5Screate_simple(1, &added, nullptr), &H5Sclose, Doing::kWriting, place);
  hdf5::check(H5Dwrite(dataset.id(), memory_type, memory_space.id(), file_space.id(), H5P_DEFAULT, values), Doing::kWriting, place);
}

void keep_rows(hid_t group, const std::string& name, hsize_t count, const std::string& where) {
  const std::string place = where + "/" + name;
  const Handle dataset(H5Dopen2(group, name.c_str(), H5P_DEFAULT), &H5Dclose, Doing::kWriting, place);
  hdf5::check(H5Dset_extent(dataset.id(), &count), Doing::kWriting, place);
}

}  // namespace longstraw::core::record
