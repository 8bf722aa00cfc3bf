#include "training/checkpoint.h"

#include "core/base/errors.h"
#include "training/training_state.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string_view>

namespace longstraw::training {

namespace {

namespace fs = std::filesystem;
using core::record::Descriptor;
using Announce = std::function<void()>;

constexpr std::string_view kName = "checkpoint-";
constexpr std::string_view kPartial = ".partial";    // being written, or being removed
constexpr std::string_view kReplaced = ".replaced";  // of the same step as one that is about to take its place

[[noreturn]] void fail(const fs::path& path, const char* what, const std::string& why) {
  throw IoError(fmt::format("{}: {}: {}", path.string(), what, why));
}

void announce(const Announce& before_write) {
  if (before_write) before_write();
}

fs::path with(const fs::path& path, std::string_view ending) { return path.string() + std::string(ending); }

// The number in "checkpoint-<number>"; nothing for any other name.
std::optional<int64_t> step_of(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!name.starts_with(kName)) return std::nullopt;
  int64_t step = 0;
  const char* begin = name.data() + kName.size();
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(begin, end, step);
  const bool plain = begin != end && *begin != '-' && (*begin != '0' || end - begin == 1);
  if (error != std::errc() || stop != end || !plain) return std::nullopt;
  return step;
}

std::vector<fs::path> entries(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> found;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) found.push_back(it->path());
  if (error) fail(folder, "can't be listed", error.message());
  std::sort(found.begin(), found.end());
  return found;
}

// Steps of the whole checkpoints, rising.
std::vector<int64_t> whole_steps(const fs::path& folder) {
  std::vector<int64_t> steps;
  std::error_code ignored;
  for (const fs::path& path : entries(folder)) {
    const auto step = step_of(path);
    if (step && fs::exists(path / kStateFile, ignored)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

void rename(const fs::path& from, const fs::path& to, const Announce& before_write) {
  announce(before_write);
  std::error_code error;
  fs::rename(from, to, error);
  if (error) fail(from, "can't be renamed", error.message());
}

// One that counts as whole is made to count no more before the first of its files goes.
void remove_tree(const fs::path& path, const Announce& before_write) {
  std::error_code error;
  fs::path doomed = path;
  if (step_of(path)) {
    doomed = with(path, kPartial);
    rename(path, doomed, before_write);
  }
  for (const fs::path& entry : entries(doomed)) {
    announce(before_write);
    fs::remove_all(entry, error);
    if (error) fail(entry, "can't be removed", error.message());
  }
  announce(before_write);
  fs::remove_all(doomed, error);
  if (error) fail(doomed, "can't be removed", error.message());
}

void sync(const fs::path& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  // Some network file systems can't sync a folder, and say so: their names are on the server already.
  if (file.get() < 0 || (::fsync(file.get()) != 0 && errno != EINVAL)) fail(path, "writing failed", std::strerror(errno));
}

void sync_tree(const fs::path& folder) {
  for (const fs::path& entry : entries(folder)) {
    if (fs::is_directory(entry)) {
      sync_tree(entry);
    } else {
      sync(entry);
    }
  }
  sync(folder);
}

// `partial` under the name `whole`. Where there is one of this name, it is only gone when the new one is there.
void put_in_place(const fs::path& partial, const fs::path& whole, const Announce& before_write) {
  std::error_code ignored;
  const fs::path replaced = with(whole, kReplaced);
  const bool replaces = fs::exists(whole, ignored);
  if (replaces) rename(whole, replaced, before_write);
  try {
    rename(partial, whole, before_write);
  } catch (...) {
    if (replaces) fs::rename(replaced, whole, ignored);
    throw;
  }
  sync(whole.parent_path());
  if (replaces) remove_tree(replaced, before_write);
}

// A killed writer leaves something half-made or half-removed, or was between the two renames of put_in_place.
void clean_up(const fs::path& folder) {
  std::error_code ignored;
  for (const fs::path& path : entries(folder)) {
    const std::string name = path.filename().string();
    const auto names_checkpoint = [&](std::string_view ending) {
      return name.ends_with(ending) && step_of(folder / name.substr(0, name.size() - ending.size()));
    };
    if (names_checkpoint(kPartial)) remove_tree(path, {});
    if (!names_checkpoint(kReplaced)) continue;
    const fs::path whole = folder / name.substr(0, name.size() - kReplaced.size());
    if (fs::exists(whole, ignored)) {
      remove_tree(path, {});
    } else {
      rename(path, whole, {});
    }
  }
}

Descriptor locked(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail(folder, "can't be made", error.message());
  Descriptor lock(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (lock.get() < 0) fail(folder, "can't be opened", std::strerror(errno));
  if (core::record::locked_by_another(lock.get(), LOCK_EX)) throw IoError(folder.string() + ": another run works in this folder");
  return lock;
}

}  // namespace

CheckpointStore::CheckpointStore(fs::path folder, int64_t keep_last, bool keep_best)
    : folder_(std::move(folder)), lock_(locked(folder_)), keep_last_(keep_last), keep_best_(keep_best) {
  clean_up(folder_);
}

std::optional<fs::path> CheckpointStore::newest() const {
  const auto steps = whole_steps(folder_);
  if (steps.empty()) return std::nullopt;
  return folder_ / fmt::format("{}{}", kName, steps.back());
}

fs::path CheckpointStore::save(const CheckpointContents& contents, const Announce& before_write) {
  const fs::path whole = folder_ / fmt::format("{}{}", kName, contents.state.step);
  const fs::path partial = with(whole, kPartial);
  try {
    write_contents(contents, partial, before_write);
    sync_tree(partial);
    put_in_place(partial, whole, before_write);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(partial, ignored);  // a full disk gets its room back
    throw;
  }
  remove_old(contents.state.step, contents.state.best_step, before_write);
  return whole;
}

void CheckpointStore::remove_old(int64_t saved, int64_t best, const Announce& before_write) const {
  if (keep_last_ == 0) return;
  const auto steps = whole_steps(folder_);
  int64_t later = 0;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (later++ < keep_last_ || *step == saved || (keep_best_ && *step == best)) continue;
    remove_tree(folder_ / fmt::format("{}{}", kName, *step), before_write);
  }
}

}  // namespace longstraw::training
