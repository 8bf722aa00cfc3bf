#include "app/interrupt.h"

#include "core/base/errors.h"

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

namespace longstraw::app {
namespace {

constexpr int kStatus = static_cast<int>(ExitStatus::kFailedRunning);

// A signal handler can reach only what has static storage.
int pipe_ends[2] = {-1, -1};
volatile std::sig_atomic_t signals_seen = 0;
std::atomic<bool> stop_is_request = false, stop_requested = false;

std::mutex& writing() {
  static auto* mutex = new std::mutex;  // outlives the watching thread
  return *mutex;
}

void on_signal(int number) {
  const int before = signals_seen;
  signals_seen = before + 1;
  if (before > 0) _exit(kStatus);
  const char byte = static_cast<char>(number);
  if (write(pipe_ends[1], &byte, 1) != 1) _exit(kStatus);
}

// Not an exception in the computing thread: that one may be minutes away from a place that looks.
void watch() {
  char number = 0;
  while (read(pipe_ends[0], &number, 1) != 1) {
  }
  if (stop_is_request) {
    stop_requested = true;
    constexpr std::string_view kText =
        "\nlongstraw: will save at the end of this step and leave (a second signal leaves at once)\n";
    if (write(STDERR_FILENO, kText.data(), kText.size()) < 0) return;
    return;  // the second signal is the handler's
  }
  const std::lock_guard wait_for_results(writing());
  const std::string text =
      fmt::format("\nlongstraw: interrupted ({}); what was not finished is not written\n", number == SIGINT ? "SIGINT" : "SIGTERM");
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) _exit(kStatus);
  _exit(kStatus);
}

}  // namespace

void stop_on_signals() {
  std::signal(SIGXFSZ, SIG_IGN);
  if (pipe2(pipe_ends, O_CLOEXEC) != 0) throw IoError("no pipe for signals: too many open files?");
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int number : {SIGINT, SIGTERM}) {
    // One that is ignored (nohup, a background job of a script) stays ignored.
    struct sigaction current = {};
    sigaction(number, nullptr, &current);
    if (current.sa_handler != SIG_IGN) sigaction(number, &action, nullptr);
  }
  std::thread(watch).detach();
}

StopRequest::StopRequest() { stop_is_request = true; }
StopRequest::~StopRequest() { stop_is_request = false; }
bool StopRequest::made() const { return stop_requested; }

WritingResults::WritingResults() : lock_(writing()) {}

}  // namespace longstraw::app
