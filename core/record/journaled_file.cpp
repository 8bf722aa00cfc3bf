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
#include <map>

#include "core/base/errors.h"
#include "core/record/file_io.h"
#include "core/record/journal.h"

namespace longstraw::core::record {
namespace {

constexpr std::size_t kPageBytes = 4096;

using Page = std::array<std::uint8_t, kPageBytes>;

}  // namespace

std::string partial_path(const std::string& path) { return path + ".partial"; }

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

  // The name is the number of a descriptor that JournaledFile has opened and locked.
  static H5FD_t* open(const char* name, unsigned, hid_t, haddr_t) {
    const int fd = ::dup(std::atoi(name));
    if (fd < 0) return nullptr;
    struct stat status {};
    if (::fstat(fd, &status) != 0) {
      ::close(fd);
      return nullptr;
    }
    auto* driver = new Driver();
    driver->fd = fd;
    // Of a reopened file nothing may change until it is known how much of it is committed.
    driver->eof = driver->committed_end = static_cast<haddr_t>(status.st_size);
    return driver;
  }

  static herr_t close(H5FD_t* file) {
    Driver& driver = of(file);
    herr_t result = 0;
    if (driver.publish_on_close && driver.owner != nullptr) {
      try {
        driver.owner->publish(driver);
      } catch (...) {  // no exception may cross HDF5's C frames; die() has told HDF5 why
        result = -1;
      }
    }
    ::close(driver.fd);
    if (driver.owner != nullptr) driver.owner->driver_ = nullptr;
    delete &driver;
    return result;
  }

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
    d.open = &Driver::open;
    d.close = &Driver::close;
    d.query = [](const H5FD_t*, unsigned long* flags) -> herr_t {
      *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE | H5FD_FEAT_AGGREGATE_SMALLDATA |
               H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
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

namespace {

using hdf5::Doing;

hdf5::Handle access_list(const std::string& where) {
  static const hid_t driver_id = H5FDregister(&journaled_driver());
  hdf5::Handle access(H5Pcreate(H5P_FILE_ACCESS), &H5Pclose, Doing::kWriting, where);
  hdf5::check(H5Pset_driver(access.id(), driver_id, nullptr), Doing::kWriting, where);
  hdf5::check(H5Pset_fclose_degree(access.id(), H5F_CLOSE_STRONG), Doing::kWriting, where);
  // The 1.8 format: attributes beyond 64 KiB (a long config), no open-for-write mark that a crash would leave behind.
  hdf5::check(H5Pset_libver_bounds(access.id(), H5F_LIBVER_V18, H5F_LIBVER_V18), Doing::kWriting, where);
  return access;
}

}  // namespace

JournaledFile::JournaledFile(const std::string& path, JournalOptions options) : path_(path), options_(std::move(options)) {
  hdf5::silence();
  if (options_.reopen) {
    reopen();
  } else {
    create();
  }
}

void JournaledFile::create() {
  const std::string where = "record " + path_;
  const std::string partial = partial_path(path_);
  const Descriptor fd = open_partial(partial.c_str());
  if (fd.get() < 0) {
    throw IoError(errno == EWOULDBLOCK ? where + ": another process is writing " + partial
                                       : fmt::format("{}: can't create {}: {}", where, partial, reason(errno)));
  }
  const hdf5::Handle access = access_list(where);
  take({H5Fcreate(std::to_string(fd.get()).c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.id()), &H5Fclose, Doing::kWriting, where},
       access);
}

void JournaledFile::reopen() {
  const std::string where = "record " + path_;
  recover(path_);
  const Descriptor fd(::open(path_.c_str(), O_RDWR | O_CLOEXEC));
  if (fd.get() < 0) throw IoError(fmt::format("{}: can't be opened for writing: {}", where, reason(errno)));
  // A journal that recover() left is that of a process that holds the file, or held it until just now.
  if (locked_by_another(fd.get(), LOCK_EX) || ::access(journal_path(path_).c_str(), F_OK) == 0) {
    throw IoError(where + ": another process reads or writes it");
  }
  const hdf5::Handle access = access_list(where);
  take({H5Fopen(std::to_string(fd.get()).c_str(), H5F_ACC_RDWR, access.id()), &H5Fclose, Doing::kReading, where}, access);
  published_ = true;
  // What a killed writer appended behind the committed end is overwritten.
  if (driver_->pages.empty()) driver_->committed_end = driver_->eoa;
}

void JournaledFile::take(hdf5::Handle file, const hdf5::Handle& access) {
  file_ = std::move(file);
  void* driver = nullptr;
  hdf5::check(H5Fget_vfd_handle(file_.id(), access.id(), &driver), Doing::kWriting, "record " + path_);
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
    require(write_journal(path_, journal, options_.durable, options_.before_write), "journal");
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

}  // namespace longstraw::core::record
