#include "core/record/opened_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

#include <cerrno>
#include <filesystem>

#include "core/base/errors.h"
#include "core/record/journal.h"

namespace longstraw::core::record {

using hdf5::Doing;
using hdf5::Handle;

OpenedFile::OpenedFile(const std::string& path, const std::string& where) {
  hdf5::silence();
  recover(path);
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) throw FormatError(where + ": no such file");
  if (!std::filesystem::is_regular_file(path, ignored)) throw FormatError(where + ": is no file");
  descriptor_ = Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (descriptor_.get() < 0) throw FormatError(fmt::format("{}: can't be opened: {}", where, reason(errno)));
  // A shared lock held while reading keeps a writer from replacing what is read; without lock support there is none.
  if (locked_by_another(descriptor_.get(), LOCK_SH)) throw FormatError(where + ": is being written by another process");
  if (H5Fis_hdf5(path.c_str()) <= 0) throw FormatError(where + ": is no HDF5 file");
  const Handle access(H5Pcreate(H5P_FILE_ACCESS), &H5Pclose, Doing::kReading, where);
#if H5_VERSION_GE(1, 10, 7)
  // The descriptor holds the lock already; HDF5's own fails on file systems that have none.
  hdf5::check(H5Pset_file_locking(access.id(), false, true), Doing::kReading, where);
#endif
  file_ = Handle(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.id()), &H5Fclose, Doing::kReading, where);
}

}  // namespace longstraw::core::record
