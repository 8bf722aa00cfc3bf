#pragma once
// What the program says while it works, on standard error: one line that is rewritten on a terminal, plain lines every
// ten seconds elsewhere. Results go to standard output and are none of its business.

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace longstraw::app {

class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // A line that stays.
  void say(std::string_view text);
  // From now on `task` is under way; the clock starts anew. Ends the task before.
  void begin(std::string_view task);
  // Where the task stands, for example "capture, 2048 tokens". Cheap; from any thread.
  void at(std::string_view where);
  // The task is done: one line with its time and `result`.
  void done(std::string_view result = {});

 private:
  void tick(std::stop_token stop);
  void show(bool plain);
  void clear_line();
  double elapsed() const;

  bool terminal_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::string task_;  // empty: nothing is under way
  std::string where_;
  double started_ = 0.0;
  bool line_shown_ = false;
  std::jthread ticker_;
};

}  // namespace longstraw::app
