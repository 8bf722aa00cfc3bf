#include "app/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace longstraw::app {
namespace {

constexpr auto kRedraw = std::chrono::milliseconds(250);
constexpr auto kPlainLine = std::chrono::seconds(10);

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

bool is_terminal() {
  const char* term = std::getenv("TERM");
  return isatty(STDERR_FILENO) == 1 && term != nullptr && std::string_view(term) != "dumb";
}

}  // namespace

Progress::Progress() : terminal_(is_terminal()), ticker_([this](std::stop_token stop) { tick(stop); }) {}

Progress::~Progress() {
  ticker_.request_stop();
  ticker_.join();
  clear_line();
}

void Progress::say(std::string_view text) {
  const std::lock_guard lock(mutex_);
  clear_line();
  fmt::print(stderr, "longstraw: {}\n", text);
}

void Progress::begin(std::string_view task) {
  const std::lock_guard lock(mutex_);
  clear_line();
  task_ = task;
  where_.clear();
  started_ = now();
}

void Progress::at(std::string_view where) {
  const std::lock_guard lock(mutex_);
  where_ = where;
}

void Progress::done(std::string_view result) {
  const std::lock_guard lock(mutex_);
  clear_line();
  fmt::print(stderr, "longstraw: {}: {:.1f} s{}{}\n", task_, elapsed(), result.empty() ? "" : ", ", result);
  task_.clear();
}

void Progress::tick(std::stop_token stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    if (terminal_) {
      changed_.wait_for(lock, stop, kRedraw, [] { return false; });
    } else {
      changed_.wait_for(lock, stop, kPlainLine, [] { return false; });
    }
    if (!stop.stop_requested() && !task_.empty()) show(!terminal_);
  }
}

void Progress::show(bool plain) {
  const std::string line = fmt::format("longstraw: {}: {:.0f} s{}{}", task_, elapsed(), where_.empty() ? "" : ", ", where_);
  if (plain) {
    fmt::print(stderr, "{}\n", line);
  } else {
    fmt::print(stderr, "\r\033[K{}", line.substr(0, 118));
    std::fflush(stderr);
    line_shown_ = true;
  }
}

void Progress::clear_line() {
  if (!line_shown_) return;
  fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
  line_shown_ = false;
}

double Progress::elapsed() const { return now() - started_; }

}  // namespace longstraw::app
