#pragma once
// The journal of a commit: the pages of a record that change, written beside it before they are changed in place
// (journaled_file.h).

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace longstraw::core::record {

struct Journal {
  std::uint64_t old_end = 0;  // length of the file before and after the commit
  std::uint64_t new_end = 0;
  std::map<std::uint64_t, std::vector<std::uint8_t>> changes;  // by offset

  // With a checksum at the end.
  std::vector<std::uint8_t> encode() const;
  // False when the bytes are not a whole journal.
  bool decode(const std::vector<std::uint8_t>& bytes);
};

std::string journal_path(const std::string& path);

// Both call `before_write` (may be empty) before each change of the disk, and return false with errno set on a failure.
// Writes the journal of record `path`; after a failure there is none.
bool write_journal(const std::string& path, const Journal& journal, bool durable, const std::function<void()>& before_write);
// Copies the pages into the open record.
bool apply(int fd, const Journal& journal, const std::function<void()>& before_write);

// Heals record `path` when its writer died inside a commit; otherwise does nothing. IoError when the journal is whole but
// the record can't be written.
void recover(const std::string& path);

}  // namespace longstraw::core::record
