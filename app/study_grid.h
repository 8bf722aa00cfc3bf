#pragma once
// The grid of `longstraw study`: lists of prompt lengths, group sizes, response lengths, tails and seeds, taken each with
// each. Needs no LibTorch.

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace longstraw::app {

// One batch, and the tails W that are measured on it.
struct StudyPoint {
  int64_t prompt_tokens = 0;    // P
  int64_t group_size = 0;       // G
  int64_t response_tokens = 0;  // R, of each response
  int64_t seed = 0;
  std::vector<int64_t> tails;  // ascending, each once; P: nothing is cut

  bool operator==(const StudyPoint&) const = default;
};

// As the command line gives it.
struct StudyGrid {
  std::vector<int64_t> prompt_tokens, group_sizes, response_tokens, seeds;
  std::vector<std::string> tails;  // numbers, or "all"
};

// Ascending in every list, repeated values once. The state of a prompt has P - 1 tokens: a tail of as many or more keeps
// everything, so that all of those are one cell. ConfigError, naming the option, for an empty list, a prompt of less than
// two tokens (no state), a group below `smallest_group`, a response below one token, and a tail that is no number.
std::vector<StudyPoint> points_of(const StudyGrid& grid, int64_t smallest_group);

// "detached" for W = 0, "exact" for W = P, else "tail".
std::string arm_of(int64_t tail_tokens, int64_t prompt_tokens);

// Work in tokens run forward, by the costs of the algorithm (a backward pass is two forward ones). What they leave out, the
// part of attention that grows with the prompt, is much the same for all cells of a point.
double sampling_work(const StudyPoint& point);
double sweep_work(const StudyPoint& point, int64_t tail_tokens);
double reference_work(const StudyPoint& point);

// What is left of a known amount of work, from the time that the finished part took. The clock runs from its making.
class TimeLeft {
 public:
  void add(double work) { total_ += work; }
  void done(double work) { done_ += work; }
  // "about 12 min left", once something is done.
  std::string text() const;

 private:
  double total_ = 0.0, done_ = 0.0;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

// "40 s", "12 min", "2 h 05 min".
std::string duration_text(double seconds);

}  // namespace longstraw::app
