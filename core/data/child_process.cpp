#include "core/data/child_process.h"

#include "core/base/errors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>
#include <thread>

extern char** environ;

namespace longstraw::core::data {
namespace {

using Clock = std::chrono::steady_clock;

// How long the end of the child may go unnoticed: something it started may hold its socket open after it is gone.
constexpr std::chrono::milliseconds kTick{50};

class FileActions {
 public:
  FileActions() { posix_spawn_file_actions_init(&actions_); }
  ~FileActions() { posix_spawn_file_actions_destroy(&actions_); }
  void move(int from, int to) { posix_spawn_file_actions_adddup2(&actions_, from, to); }
  const posix_spawn_file_actions_t* get() const { return &actions_; }

 private:
  posix_spawn_file_actions_t actions_{};
};

class OwnGroup {
 public:
  OwnGroup() {
    posix_spawnattr_init(&attributes_);
    // The child starts with default signal handling, whatever this process ignores or blocks.
    sigset_t all, none;
    sigfillset(&all);
    sigemptyset(&none);
    posix_spawnattr_setsigdefault(&attributes_, &all);
    posix_spawnattr_setsigmask(&attributes_, &none);
    posix_spawnattr_setpgroup(&attributes_, 0);
    posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
  }
  ~OwnGroup() { posix_spawnattr_destroy(&attributes_); }
  const posix_spawnattr_t* get() const { return &attributes_; }

 private:
  posix_spawnattr_t attributes_{};
};

std::vector<std::string> merged_environment(const std::vector<std::string>& added) {
  std::map<std::string, std::string> by_name;
  const auto put = [&](const std::string& entry) { by_name[entry.substr(0, entry.find('='))] = entry; };
  for (char** entry = environ; *entry != nullptr; ++entry) put(*entry);
  for (const std::string& entry : added) put(entry);
  std::vector<std::string> merged;
  for (auto& [name, entry] : by_name) merged.push_back(std::move(entry));
  return merged;
}

std::vector<char*> c_array(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

void close_fd(int& fd) {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

}  // namespace

ChildProcess::ChildProcess(ChildOptions options) : options_(std::move(options)) {
  std::array<int, 2> both{-1, -1}, errors{-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both.data()) != 0 || ::pipe2(errors.data(), O_CLOEXEC) != 0) {
    const std::string why = std::strerror(errno);
    std::for_each(both.begin(), both.end(), close_fd);
    throw ProcessError(ProcessFault::kEnded, fmt::format("{}: can't be started: {}", options_.command.at(0), why));
  }
  FileActions actions;
  actions.move(both[1], STDIN_FILENO);
  actions.move(both[1], STDOUT_FILENO);
  actions.move(errors[1], STDERR_FILENO);
  std::vector<std::string> environment = merged_environment(options_.environment);
  std::vector<std::string> command = options_.command;
  const int failed = ::posix_spawnp(&pid_, command.at(0).c_str(), actions.get(), OwnGroup().get(), c_array(command).data(),
                                    c_array(environment).data());
  ::close(both[1]);
  ::close(errors[1]);
  socket_ = both[0];
  errors_ = errors[0];
  ::fcntl(socket_, F_SETFL, O_NONBLOCK);
  ::fcntl(errors_, F_SETFL, O_NONBLOCK);
  if (failed != 0) {
    pid_ = -1;
    close_fd(socket_);
    close_fd(errors_);
    throw ProcessError(ProcessFault::kEnded, fmt::format("{}: can't be started: {}", options_.command[0], std::strerror(failed)));
  }
}

ChildProcess::~ChildProcess() {
  if (pid_ > 0) {
    ::shutdown(socket_, SHUT_RDWR);  // the end of its input: a well-behaved child leaves
    wait_until(Clock::now() + std::chrono::seconds(2));
  }
  kill();
}

// Seen, but left to be reaped: until then its process group's number belongs to nobody else.
bool ChildProcess::has_ended() const {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid_;
}

void ChildProcess::wait_until(Clock::time_point deadline) {
  while (!has_ended() && Clock::now() < deadline) {
    drain_errors();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

std::string ChildProcess::reap() {
  ::kill(-pid_, SIGKILL);
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  if (WIFSIGNALED(status)) return fmt::format("signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  return fmt::format("exit status {}", WEXITSTATUS(status));
}

void ChildProcess::kill() {
  if (pid_ > 0) {
    reap();
    drain_errors();
  }
  close_fd(socket_);
  close_fd(errors_);
}

void ChildProcess::fail(ProcessFault fault, const std::string& problem) {
  kill();
  throw ProcessError(fault, problem + last_words());
}

std::string ChildProcess::exchange(std::string_view line, std::chrono::duration<double> limit) {
  constexpr std::size_t kLongest = std::size_t{1} << 30;
  if (pid_ <= 0) throw ProcessError(ProcessFault::kEnded, "the process has ended already" + last_words());
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::min(limit, std::chrono::duration<double>(1e8)));
  const std::string request = std::string(line) + "\n";
  std::string_view rest = request;
  std::size_t searched = 0;  // of received_, without finding a newline
  for (;;) {
    const std::size_t end = received_.find('\n', searched);
    if (rest.empty() && end != std::string::npos) {
      std::string answer = received_.substr(0, end);
      received_.erase(0, end + 1);
      drain_errors();
      return answer;
    }
    if (end == std::string::npos) searched = received_.size();
    if (received_.size() > kLongest) fail(ProcessFault::kRubbish, "sent more than 1 GiB without a newline");
    // Both ways at once: a child that talks before it has read all would otherwise wait for us as we wait for it.
    std::array<pollfd, 2> ready = {pollfd{socket_, static_cast<short>(rest.empty() ? POLLIN : POLLIN | POLLOUT), 0},
                                   pollfd{errors_, POLLIN, 0}};
    ::poll(ready.data(), ready.size(), static_cast<int>(kTick.count()));
    const bool ended = has_ended();  // asked before the last bytes are taken, so that none is missed
    drain_errors();
    const bool open = send_some(rest) & receive_some();
    const bool answered = rest.empty() && received_.find('\n', searched) != std::string::npos;
    if ((ended || !open) && !answered) {
      wait_until(std::min(deadline, Clock::now() + std::chrono::seconds(2)));
      if (!has_ended()) fail(ProcessFault::kEnded, "closed its output");
      drain_errors();
      const std::string status = reap();
      fail(ProcessFault::kEnded, "ended with " + status);
    }
    if (Clock::now() >= deadline) fail(ProcessFault::kTimedOut, fmt::format("gave no answer within {:g} s", limit.count()));
  }
}

bool ChildProcess::send_some(std::string_view& rest) {
  while (!rest.empty()) {
    const ssize_t count = ::send(socket_, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    rest.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

bool ChildProcess::receive_some() {
  std::array<char, 1 << 16> buffer;
  for (;;) {
    const ssize_t count = ::recv(socket_, buffer.data(), buffer.size(), 0);
    if (count == 0) return false;
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    received_.append(buffer.data(), static_cast<std::size_t>(count));
    if (std::find(buffer.data(), buffer.data() + count, '\n') != buffer.data() + count) return true;
  }
}

void ChildProcess::drain_errors() {
  constexpr std::size_t kLines = 10, kLongest = 500;
  std::array<char, 1 << 14> buffer;
  ssize_t count = 0;
  while (errors_ >= 0 && (count = ::read(errors_, buffer.data(), buffer.size())) > 0) {
    if (options_.echo_errors) {
      [[maybe_unused]] const ssize_t echoed = ::write(STDERR_FILENO, buffer.data(), static_cast<std::size_t>(count));
    }
    for (const char c : std::string_view(buffer.data(), static_cast<std::size_t>(count))) {
      if (c != '\n') {
        if (error_line_.size() < kLongest) error_line_ += c;
        continue;
      }
      error_lines_.push_back(std::move(error_line_));
      error_line_.clear();
      if (error_lines_.size() > kLines) error_lines_.pop_front();
    }
  }
}

std::string ChildProcess::last_words() const {
  std::string text;
  const auto add = [&](const std::string& line) {
    if (line.find_first_not_of(" \t\r") != std::string::npos) text += "\n  | " + line;
  };
  std::for_each(error_lines_.begin(), error_lines_.end(), add);
  add(error_line_);
  return text.empty() ? text : "; the last it wrote to its standard error:" + text;
}

}  // namespace longstraw::core::data
