#pragma once
// How the program ends when it is told to: SIGINT (Ctrl-C) and SIGTERM end it with exit status 3 at once, whatever it
// computes, except while it writes its results: then right after. A record or rollouts file is whole or not there. A training run
// is asked to save and leave instead.

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

// While one lives, a signal ends nothing: it is a request, which the run answers at the end of its step. A second signal ends the
// program at once.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;
  bool made() const;
};

}  // namespace longstraw::app
