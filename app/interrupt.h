#pragma once
// How the program ends when it is told to: SIGINT (Ctrl-C) and SIGTERM end it with exit status 3 at once, whatever it
// computes, except while it writes its results: then right after. A record or rollouts file is whole or not there.

#include <mutex>

namespace longstraw::app {

// Call once, before any thread is started. A file-size limit (SIGXFSZ) becomes a failed write.
void stop_on_signals();

// While one lives, a signal waits. A second signal does not.
class WritingResults {
 public:
  WritingResults();

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace longstraw::app
