#pragma once
// An HDF5 file opened for reading: healed first when its writer died inside a commit, and locked against writers meanwhile.

#include <string>

#include "core/record/file_io.h"
#include "core/record/hdf5.h"

namespace longstraw::core::record {

class OpenedFile {
 public:
  // FormatError, beginning with `where`, for a file that is missing, no HDF5 file, or being written at this moment.
  OpenedFile(const std::string& path, const std::string& where);

  hid_t id() const { return file_.id(); }
  int descriptor() const { return descriptor_.get(); }

 private:
  Descriptor descriptor_;  // holds the lock: released after the HDF5 file is closed
  hdf5::Handle file_;
};

}  // namespace longstraw::core::record
