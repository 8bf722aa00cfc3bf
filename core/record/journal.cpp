#include "core/record/journal.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/base/errors.h"
#include "core/record/file_io.h"

namespace longstraw::core::record {
namespace {

constexpr std::array<char, 8> kMagic{'L', 'S', 'J', 'R', 'N', 'L', '0', '1'};

void append(std::vector<std::uint8_t>& out, const void* data, std::size_t size) {
  const std::size_t old_size = out.size();
  out.resize(old_size + size);
  std::memcpy(out.data() + old_size, data, size);
}

void append(std::vector<std::uint8_t>& out, std::uint64_t value) { append(out, &value, sizeof value); }

bool write_bytes(const std::string& name, const std::vector<std::uint8_t>& bytes, bool durable,
                 const std::function<void()>& before_write) {
  if (before_write) before_write();
  const Descriptor fd(::open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (fd.get() < 0) return false;
  // In two halves so that a test can stop between them.
  const std::size_t half = bytes.size() / 2;
  if (before_write) before_write();
  if (!write_all(fd.get(), bytes.data(), half, 0)) return false;
  if (before_write) before_write();
  if (!write_all(fd.get(), bytes.data() + half, bytes.size() - half, half)) return false;
  if (!durable) return true;
  if (::fsync(fd.get()) != 0) return false;
  sync_folder(name);
  return true;
}

}  // namespace

std::string journal_path(const std::string& path) { return path + ".journal"; }

std::vector<std::uint8_t> Journal::encode() const {
  std::vector<std::uint8_t> out;
  append(out, kMagic.data(), kMagic.size());
  append(out, old_end);
  append(out, new_end);
  append(out, changes.size());
  for (const auto& [offset, bytes] : changes) {
    append(out, offset);
    append(out, bytes.size());
    append(out, bytes.data(), bytes.size());
  }
  append(out, XXH64(out.data(), out.size(), 0));
  return out;
}

bool Journal::decode(const std::vector<std::uint8_t>& bytes) {
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  if (bytes.size() < kMagic.size() + 4 * kWord || std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) return false;
  const std::size_t body = bytes.size() - kWord;
  std::uint64_t checksum = 0;
  std::memcpy(&checksum, bytes.data() + body, kWord);
  if (checksum != XXH64(bytes.data(), body, 0)) return false;
  std::size_t at = kMagic.size();
  const auto next = [&] {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes.data() + at, kWord);
    at += kWord;
    return value;
  };
  old_end = next();
  new_end = next();
  for (std::uint64_t left = next(); left > 0; --left) {
    const std::uint64_t offset = next();
    const std::uint64_t size = next();
    if (size > body - at) return false;
    changes[offset].assign(bytes.begin() + at, bytes.begin() + at + size);
    at += size;
  }
  return true;
}

bool write_journal(const std::string& path, const Journal& journal, bool durable, const std::function<void()>& before_write) {
  const std::string name = journal_path(path);
  if (write_bytes(name, journal.encode(), durable, before_write)) return true;
  const int error = errno;
  ::unlink(name.c_str());
  errno = error;
  return false;
}

bool apply(int fd, const Journal& journal, const std::function<void()>& before_write) {
  for (const auto& [offset, bytes] : journal.changes) {
    if (before_write) before_write();
    if (!write_all(fd, bytes.data(), bytes.size(), offset)) return false;
  }
  return true;
}

void recover(const std::string& path) {
  const std::string journal_name = journal_path(path);
  const Descriptor source(::open(journal_name.c_str(), O_RDONLY | O_CLOEXEC));
  if (source.get() < 0) return;
  const Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  const int open_error = errno;
  // A living writer is inside a commit: it needs no help.
  if (file.get() >= 0 && locked_by_another(file.get(), LOCK_EX)) return;
  struct stat status {};
  if (::fstat(source.get(), &status) != 0) return;
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(status.st_size));
  Journal journal;
  const bool whole = read_all(source.get(), bytes.data(), bytes.size(), 0) && journal.decode(bytes);
  if (file.get() < 0) {
    if (!whole || open_error == ENOENT) return;
    throw IoError(fmt::format("record {}: its writer died inside a commit; {} heals it, but the record can't be written: {}", path,
                              journal_name, reason(open_error)));
  }
  if (whole) {
    // Shorter than when the journal was made: some other file, or a damaged one that a journal can't heal.
    if (::fstat(file.get(), &status) != 0 ||
        static_cast<std::uint64_t>(status.st_size) < std::min(journal.old_end, journal.new_end)) {
      return;
    }
    if (!apply(file.get(), journal, nullptr) || ::ftruncate(file.get(), static_cast<off_t>(journal.new_end)) != 0 ||
        ::fsync(file.get()) != 0) {
      throw IoError(fmt::format("record {}: healing it from {} failed: {}", path, journal_name, reason(errno)));
    }
  }
  ::unlink(journal_name.c_str());
}

}  // namespace longstraw::core::record
