#pragma once
// Where results go, tried before the long work: a run of hours must not fail at its last line.

#include <filesystem>

namespace longstraw::app {

// Throws IoError when a file can't be made at `path` (by making one beside it, and removing it again).
void require_writable_file(const std::filesystem::path& path);

// The same for a record. ConfigError when `path` is there and is no HDF5 file: it is somebody's, and a slip of the pen
// must not replace it. An older record is replaced when the new one is whole.
void require_writable_record(const std::filesystem::path& path);

// Makes `folder` with its parents. IoError when it can't be, or nothing can be written into it.
void require_writable_folder(const std::filesystem::path& folder);

// Everything written to standard output has arrived; IoError otherwise (a full disk behind a redirection).
void flush_standard_output();

}  // namespace longstraw::app
