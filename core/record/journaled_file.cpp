#include "core/record/journaled_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/base/errors.h"

namespace longstraw::core::record {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::array<char, 8> kMagic{'L', 'S', 'J', 'R', 'N', 'L', '0', '1'};
constexpr std::size_t kMaxTransfer = std::size_t{1} << 30;  // one write(2) moves less than 2 GiB

using Page = std::array<std::uint8_t, kPageBytes>;

// The name of an errno value, as message text.
std::string reason(int error) { return std::strerror(error); }

// An open file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// False with errno set when not everything could be written.
bool write_all(int fd, const void* data, std::size_t size, std::uint64_t offset) {
  const auto* bytes = static_cast<const std::uint8_t*>(data);
  while (size > 0) {
    const ssize_t done = ::pwrite(fd, bytes, std::min(size, kMaxTransfer), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    bytes += done;
    size -= static_cast<std::size_t>(done);
    offset += static_cast<std::uint64_t>(done);
  }
  return true;
}

// Bytes past the end of the file read as zero.
bool read_all(int fd, void* data, std::size_t size, std::uint64_t offset) {
  auto* bytes = static_cast<std::uint8_t*>(data);
  while (size > 0) {
    const ssize_t done = ::pread(fd, bytes, std::min(size, kMaxTransfer), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return false;
    if (done == 0) {
      std::memset(bytes, 0, size);
      return true;
    }
    bytes += done;
    size -= static_cast<std::size_t>(done);
    offset += static_cast<std::uint64_t>(done);
  }
  return true;
}

// Makes a change of names in the file's folder durable.
void sync_folder(const std::string& path) {
  auto folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) folder = ".";
  const Descriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() >= 0) ::fsync(fd.get());
}

// A file system without locks (some network mounts) leaves it to the user not to run two writers.
bool locked_by_another(int fd, int kind) { return ::flock(fd, kind | LOCK_NB) != 0 && errno == EWOULDBLOCK; }

void append(std::vector<std::uint8_t>& out, const void* data, std::size_t size) {
  const auto* bytes = static_cast<const std::uint8_t*>(data);
  out.insert(out.end(), bytes, bytes + size);
}

void append(std::vector<std::uint8_t>& out, std::uint64_t value) { append(out, &value, sizeof value); }

// What a journal holds: the file's length before and after, and the pages that change.
struct Journal {
  std::uint64_t old_end = 0;
  std::uint64_t new_end = 0;
  std::map<std::uint64_t, std::vector<std::uint8_t>> changes;  // by offset

  std::vector<std::uint8_t> encode() const;
  // False when the bytes are not a whole journal.
  bool decode(const std::vector<std::uint8_t>& bytes);
};

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
    changes[offset].assign(bytes.begin() + at, bytes.begin() + at + size);
    at += size;
  }
  return true;
}

}  // namespace

std::string partial_path(const std::string& path) { return path + ".partial"; }
std::string journal_path(const std::string& path) { return path + ".journal"; }

// What HDF5 calls. `committed_end` bytes of the file are only changed by publish().
struct JournaledFile::Driver : H5FD_t {
  int fd = -1;
  haddr_t eoa = 0;  // end of what HDF5 has allocated
  haddr_t eof = 0;  // end of the file
  haddr_t committed_end = 0;
  std::map<std::uint64_t, Page> pages;  // changed committed pages, by page number
  bool dead = false;                    // nothing reaches the disk any more
  std::string death;
  JournaledFile* owner = nullptr;
  bool publish_on_close = false;
  bool journal_is_whole = false;  // the commit is decided: a failure from here on is healed forwards, by recover()

  static Driver& of(H5FD_t* file) { return *static_cast<Driver*>(file); }
  static const Driver& of(const H5FD_t* file) { return *static_cast<const Driver*>(file); }

  void before_write() const {
    if (owner != nullptr && owner->options_.before_write) owner->options_.before_write();
  }

  // Remembers the first failure and tells HDF5 about it.
  herr_t die(const std::string& what, int error) {
    if (!dead) death = what + ": " + reason(error);
    dead = true;
    H5Epush2(H5E_DEFAULT, __FILE__, "JournaledFile", __LINE__, H5E_ERR_CLS, H5E_VFL, H5E_WRITEERROR, "%s", death.c_str());
    return -1;
  }

  bool load_page(std::uint64_t number, Page& page) const {
    page.fill(0);
    const std::uint64_t begin = number * kPageBytes;
    return read_all(fd, page.data(), std::min<std::uint64_t>(kPageBytes, committed_end - begin), begin);
  }

  herr_t write_bytes(haddr_t addr, const std::uint8_t* bytes, std::size_t size) {
    while (size > 0 && addr < committed_end) {
      const std::uint64_t number = addr / kPageBytes;
      const std::size_t within = addr % kPageBytes;
      const std::size_t part = std::min({size, kPageBytes - within, static_cast<std::size_t>(committed_end - addr)});
      auto found = pages.find(number);
      if (found == pages.end()) {
        found = pages.emplace(number, Page{}).first;
        if (!load_page(number, found->second)) return die("read", errno);
      }
      std::memcpy(found->second.data() + within, bytes, part);
      addr += part;
      bytes += part;
      size -= part;
    }
    if (size == 0) return 0;
    before_write();
    if (!write_all(fd, bytes, size, addr)) return die("write", errno);
    eof = std::max<haddr_t>(eof, addr + size);
    return 0;
  }

  herr_t read_bytes(haddr_t addr, std::uint8_t* bytes, std::size_t size) {
    if (!read_all(fd, bytes, size, addr)) return die("read", errno);
    if (addr >= committed_end) return 0;
    const haddr_t end = std::min<haddr_t>(addr + size, committed_end);
    for (auto page = pages.lower_bound(addr / kPageBytes); page != pages.end() && page->first * kPageBytes < end; ++page) {
      const haddr_t page_begin = page->first * kPageBytes;
      const haddr_t from = std::max(addr, page_begin);
      const haddr_t to = std::min<haddr_t>(end, page_begin + kPageBytes);
      std::memcpy(bytes + (from - addr), page->second.data() + (from - page_begin), to - from);
    }
    return 0;
  }

  herr_t truncate_file() {
    // Committed bytes may only go once the commit that frees them is published.
    if (eoa == eof || eoa < committed_end) return 0;
    before_write();
    if (::ftruncate(fd, static_cast<off_t>(eoa)) != 0) return die("truncate", errno);
    eof = eoa;
    return 0;
  }

  Journal journal() const {
    Journal result{.old_end = committed_end, .new_end = eoa, .changes = {}};
    for (const auto& [number, page] : pages) {
      const std::uint64_t begin = number * kPageBytes;
      const auto size = static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(kPageBytes, committed_end - begin));
      result.changes[begin].assign(page.begin(), page.begin() + size);
    }
    return result;
  }
};

namespace {

// Locks and empties PATH.partial. The lock may have been won on a file that its former owner has just renamed: look again.
Descriptor open_partial(const char* path) {
  for (;;) {
    Descriptor fd(::open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    if (fd.get() < 0) return fd;
    if (locked_by_another(fd.get(), LOCK_EX)) {
      errno = EWOULDBLOCK;
      return Descriptor();
    }
    struct stat opened {};
    struct stat named {};
    if (::fstat(fd.get(), &opened) != 0) return Descriptor();
    if (::stat(path, &named) != 0 || named.st_ino != opened.st_ino) continue;
    if (::ftruncate(fd.get(), 0) != 0) return Descriptor();
    return fd;
  }
}

bool apply(int fd, const Journal& journal, const std::function<void()>& before_write) {
  for (const auto& [offset, bytes] : journal.changes) {
    if (before_write) before_write();
    if (!write_all(fd, bytes.data(), bytes.size(), offset)) return false;
  }
  return true;
}

bool write_journal(const std::string& name, const std::vector<std::uint8_t>& bytes, const JournalOptions& options) {
  if (options.before_write) options.before_write();
  const Descriptor fd(::open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (fd.get() < 0) return false;
  // In two halves so that a test can stop between them.
  const std::size_t half = bytes.size() / 2;
  if (options.before_write) options.before_write();
  if (!write_all(fd.get(), bytes.data(), half, 0)) return false;
  if (options.before_write) options.before_write();
  if (!write_all(fd.get(), bytes.data() + half, bytes.size() - half, half)) return false;
  if (options.durable) {
    if (::fsync(fd.get()) != 0) return false;
    sync_folder(name);
  }
  return true;
}

}  // namespace

const H5FD_class_t& journaled_driver() {
  using Driver = JournaledFile::Driver;
  static const H5FD_class_t driver = [] {
    H5FD_class_t d{};
#if H5_VERSION_GE(1, 14, 0)
    d.version = H5FD_CLASS_VERSION;
    d.value = static_cast<H5FD_class_value_t>(1907);
#endif
    d.name = "longstraw-journal";
    d.maxaddr = static_cast<haddr_t>(INT64_MAX);
    d.fc_degree = H5F_CLOSE_STRONG;
    d.open = [](const char* name, unsigned, hid_t, haddr_t) -> H5FD_t* {
      const int fd = ::dup(std::atoi(name));
      if (fd < 0) return nullptr;
      auto* driver = new Driver();
      driver->fd = fd;
      return driver;
    };
    d.close = [](H5FD_t* file) -> herr_t {
      Driver& driver = Driver::of(file);
      herr_t result = 0;
      if (driver.publish_on_close && driver.owner != nullptr) {
        try {
          driver.owner->publish(driver);
        } catch (const Error&) {
          result = -1;
        }
      }
      ::close(driver.fd);
      if (driver.owner != nullptr) driver.owner->driver_ = nullptr;
      delete &driver;
      return result;
    };
    d.query = [](const H5FD_t*, unsigned long* flags) -> herr_t {
      *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
               H5FD_FEAT_AGGREGATE_SMALLDATA | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
      return 0;
    };
    d.get_eoa = [](const H5FD_t* file, H5FD_mem_t) -> haddr_t { return Driver::of(file).eoa; };
    d.set_eoa = [](H5FD_t* file, H5FD_mem_t, haddr_t addr) -> herr_t {
      Driver::of(file).eoa = addr;
      return 0;
    };
    d.get_eof = [](const H5FD_t* file, H5FD_mem_t) -> haddr_t { return Driver::of(file).eof; };
    d.get_handle = [](H5FD_t* file, hid_t, void** handle) -> herr_t {
      *handle = &Driver::of(file);
      return 0;
    };
    d.read = [](H5FD_t* file, H5FD_mem_t, hid_t, haddr_t addr, size_t size, void* buffer) -> herr_t {
      return Driver::of(file).read_bytes(addr, static_cast<std::uint8_t*>(buffer), size);
    };
    // A dead file accepts everything and keeps nothing, so that HDF5 can close it in peace.
    d.write = [](H5FD_t* file, H5FD_mem_t, hid_t, haddr_t addr, size_t size, const void* buffer) -> herr_t {
      Driver& driver = Driver::of(file);
      return driver.dead ? 0 : driver.write_bytes(addr, static_cast<const std::uint8_t*>(buffer), size);
    };
    d.truncate = [](H5FD_t* file, hid_t, hbool_t) -> herr_t {
      Driver& driver = Driver::of(file);
      return driver.dead ? 0 : driver.truncate_file();
    };
    return d;
  }();
  return driver;
}

JournaledFile::JournaledFile(const std::string& path, JournalOptions options) : path_(path), options_(std::move(options)) {
  hdf5::silence();
  const std::string where = "record " + path;
  const std::string partial = partial_path(path);
  const Descriptor fd = open_partial(partial.c_str());
  if (fd.get() < 0) {
    throw IoError(errno == EWOULDBLOCK ? where + ": another process is writing " + partial
                                       : fmt::format("{}: can't create {}: {}", where, partial, reason(errno)));
  }
  using hdf5::Doing;
  static const hid_t driver_id = H5FDregister(&journaled_driver());
  const hdf5::Handle access(H5Pcreate(H5P_FILE_ACCESS), &H5Pclose, Doing::kWriting, where);
  hdf5::check(H5Pset_driver(access.id(), driver_id, nullptr), Doing::kWriting, where);
  hdf5::check(H5Pset_fclose_degree(access.id(), H5F_CLOSE_STRONG), Doing::kWriting, where);
  // The 1.8 format: attributes beyond 64 KiB (a long config), no open-for-write mark that a crash would leave behind.
  hdf5::check(H5Pset_libver_bounds(access.id(), H5F_LIBVER_V18, H5F_LIBVER_V18), Doing::kWriting, where);
  file_ = hdf5::Handle(H5Fcreate(std::to_string(fd.get()).c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.id()), &H5Fclose,
                       Doing::kWriting, where);
  void* driver = nullptr;
  hdf5::check(H5Fget_vfd_handle(file_.id(), access.id(), &driver), Doing::kWriting, where);
  driver_ = static_cast<Driver*>(driver);
  driver_->owner = this;
}

JournaledFile::~JournaledFile() { abandon(); }

void JournaledFile::abandon() {
  if (driver_ == nullptr) return;
  driver_->dead = true;
  if (driver_->journal_is_whole) {
    // The appended bytes belong to a commit that recover() will finish.
  } else if (published_) {
    // What was appended since the last commit is garbage that nothing refers to.
    [[maybe_unused]] const int ignored = ::ftruncate(driver_->fd, static_cast<off_t>(driver_->committed_end));
  } else {
    ::unlink(partial_path(path_).c_str());
  }
  file_.close();
}

void JournaledFile::commit() {
  const std::string where = "record " + path_;
  if (driver_ == nullptr) throw IoError(where + ": is closed");
  if (driver_->dead) throw IoError(where + ": " + driver_->death);
  if (H5Fflush(file_.id(), H5F_SCOPE_GLOBAL) < 0) {
    driver_->dead = true;
    hdf5::fail(hdf5::Doing::kWriting, where);
  }
  publish(*driver_);
}

void JournaledFile::close() {
  commit();
  // Closing gives back space at the end of the file, which changes committed bytes once more.
  driver_->publish_on_close = true;
  hdf5::check(file_.close(), hdf5::Doing::kWriting, "record " + path_);
}

void JournaledFile::publish(Driver& driver) {
  const std::string where = "record " + path_;
  const std::string journal_name = journal_path(path_);
  const auto require = [&](bool fine, const char* what) {
    if (fine) return;
    driver.die(what, errno);
    throw IoError(where + ": " + driver.death);
  };
  require(!driver.dead, "write");
  require(driver.truncate_file() == 0, "truncate");
  if (options_.durable) require(::fdatasync(driver.fd) == 0, "sync");
  if (!published_) {
    driver.before_write();
    ::unlink(journal_name.c_str());  // left by an earlier record of this name
    require(::rename(partial_path(path_).c_str(), path_.c_str()) == 0, "rename");
    if (options_.durable) sync_folder(path_);
    published_ = true;
  } else if (!driver.pages.empty() || driver.eoa != driver.committed_end) {
    const Journal journal = driver.journal();
    const auto bytes = journal.encode();
    if (!write_journal(journal_name, bytes, options_)) {
      const int error = errno;
      ::unlink(journal_name.c_str());
      errno = error;
      require(false, "journal");
    }
    driver.journal_is_whole = true;
    require(apply(driver.fd, journal, options_.before_write), "write");
    driver.before_write();
    if (driver.eof != driver.eoa) require(::ftruncate(driver.fd, static_cast<off_t>(driver.eoa)) == 0, "truncate");
    driver.eof = driver.eoa;
    if (options_.durable) require(::fdatasync(driver.fd) == 0, "sync");
    driver.before_write();
    ::unlink(journal_name.c_str());
    driver.journal_is_whole = false;
  }
  driver.pages.clear();
  driver.committed_end = driver.eoa;
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
    throw IoError(fmt::format("record {}: its writer died inside a commit; {} heals it, but the record can't be written: {}",
                              path, journal_name, reason(open_error)));
  }
  if (whole) {
    // Shorter than when the journal was made: some other file, or a damaged one that a journal can't heal.
    if (::fstat(file.get(), &status) != 0 || static_cast<std::uint64_t>(status.st_size) < std::min(journal.old_end, journal.new_end)) {
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
