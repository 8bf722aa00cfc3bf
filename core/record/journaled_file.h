#pragma once
// The HDF5 file driver under the writer: it makes a commit all or nothing, whatever moment the process dies at.
//
// HDF5 updates a file in place: adding one group touches several older blocks, and a process killed between two of
// those writes leaves a file that no longer opens. So:
//   - bytes past the last committed end go straight into the file: nothing that is committed refers to them;
//   - changes to committed bytes stay in memory, page by page, and are seen by HDF5's own reads;
//   - commit() makes the new bytes durable, writes the changed pages into `PATH.journal` (closed by a checksum), makes that
//     durable, copies the pages into the file, and removes the journal.
// A death before the journal is whole leaves the file as the last commit left it; a death after that is healed by
// recover(), which copies the pages again (any number of times gives the same file). The file is plain HDF5.
//
// A new file is written as `PATH.partial` and takes its name at the first commit. While it is written the file is locked
// (flock), so that two writers, or a reader and a writer, do not meet.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "core/record/hdf5.h"

namespace longstraw::core::record {

struct JournalOptions {
  bool reopen = false;  // go on with the file that is there, as its last commit left it
  bool durable = true;  // fsync at each commit: survives a power cut, not only a killed process
  // Called before each step that changes the disk; for tests that stop the process there.
  std::function<void()> before_write = {};
};

// One file being created. Not for several threads.
class JournaledFile {
 public:
  // Creates `path`.partial. IoError when that can't be created or another process writes it. With `reopen`: heals and locks
  // `path` itself; IoError also when another process reads it, FormatError when it is no HDF5 file or cut short. What is freed in a
  // file that was reopened is used again: through memory and the journal, so close and reopen after freeing much.
  JournaledFile(const std::string& path, JournalOptions options);
  // Drops what was not committed; without any commit nothing is left on disk.
  ~JournaledFile();
  JournaledFile(const JournaledFile&) = delete;
  JournaledFile& operator=(const JournaledFile&) = delete;

  hid_t id() const { return file_.id(); }
  // Publishes everything written so far. After an IoError the file stays as the last commit left it, and stays so.
  void commit();
  // Publishes and closes; then the lock is gone.
  void close();
  // Gives up: nothing of what was not committed reaches the disk any more.
  void abandon();
  bool published() const { return published_; }

 private:
  struct Driver;
  void publish(Driver& driver);
  void create();
  void reopen();
  void take(hdf5::Handle file, const hdf5::Handle& access);

  std::string path_;
  JournalOptions options_;
  hdf5::Handle file_;
  Driver* driver_ = nullptr;  // owned by HDF5 until the file is closed
  bool published_ = false;

  friend const H5FD_class_t& journaled_driver();
};

std::string partial_path(const std::string& path);

}  // namespace longstraw::core::record
