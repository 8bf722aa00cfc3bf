#pragma once
// A child process that answers lines with lines, and that can neither hang us, nor kill us, nor outlive us.
//
// Its standard input and output are one socket, its standard error a pipe whose last lines are kept for messages. It
// leads a process group of its own: when it is ended, what it started ends too. Writing to one that is dead raises no
// SIGPIPE. It is reaped in every case.

#include "core/base/errors.h"

#include <sys/types.h>

#include <chrono>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::core::data {

// What went wrong with a process that was asked, for those who can do without its answer.
enum class ProcessFault {
  kTimedOut,  // no answer in time; it has been ended
  kEnded,     // it died, closed its output, or could not be started
  kRubbish,   // what it said is no answer
  kRaised,    // it answers that it failed
  kAnswer,    // an answer of the right form with an unusable content: too few, no number, NaN
};

class ProcessError : public CommunicationError {
 public:
  ProcessError(ProcessFault fault, const std::string& message) : CommunicationError(message), fault_(fault) {}
  ProcessFault fault() const { return fault_; }

 private:
  ProcessFault fault_;
};

struct ChildOptions {
  std::vector<std::string> command;      // program (looked up in PATH) and arguments
  std::vector<std::string> environment;  // NAME=value, added to ours or replacing them
  bool echo_errors = true;               // pass the child's standard error on to ours
};

class ChildProcess {
 public:
  explicit ChildProcess(ChildOptions options);  // throws ProcessError if the program can't be started
  ~ChildProcess();                              // gives it two seconds to leave by itself
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // Sends `line` and returns the next line of the child. Throws ProcessError, and the child has then been ended,
  // when it takes longer than `limit`, ends, closes its output, or sends more than 1 GiB without a newline.
  std::string exchange(std::string_view line, std::chrono::duration<double> limit);

  // Ends it and all that it started, at once.
  void kill();
  bool is_running() const { return pid_ > 0; }
  pid_t pid() const { return pid_; }
  // ": its last words: ..." with what it last wrote to its standard error, or nothing.
  std::string last_words() const;

 private:
  bool has_ended() const;
  void wait_until(std::chrono::steady_clock::time_point deadline);
  std::string reap();  // "exit status 3", "signal 9 (Killed)"
  bool send_some(std::string_view& rest);
  bool receive_some();
  void drain_errors();
  [[noreturn]] void fail(ProcessFault fault, const std::string& problem);

  ChildOptions options_;
  pid_t pid_ = -1;
  int socket_ = -1;
  int errors_ = -1;
  std::string received_;
  std::string error_line_;
  std::deque<std::string> error_lines_;
};

}  // namespace longstraw::core::data
