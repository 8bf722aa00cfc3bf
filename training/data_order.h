#pragma once
// Which prompt comes next: a seeded permutation of the rows for every epoch, one epoch behind the other without a gap. A
// generation may begin in one epoch and end in the next, so that no prompt is left out whatever prompts_per_step is. Everything is
// a function of (seed, position): a resumed run goes on with the same prompts.

#include <cstdint>
#include <vector>

namespace longstraw::training {

struct DataPosition {
  int64_t epoch = 0;
  int64_t taken = 0;  // rows of this epoch
  bool operator==(const DataPosition&) const = default;
};

class DataOrder {
 public:
  DataOrder(int64_t rows, uint64_t seed, bool shuffle);

  // The row at `at`, which moves on; behind an epoch's last row comes the next epoch's first.
  int64_t take(DataPosition& at);
  int64_t rows() const { return rows_; }
  // Rows taken since the start of the run: tells all draws of a run apart.
  int64_t count(const DataPosition& at) const { return at.epoch * rows_ + at.taken; }

 private:
  int64_t rows_;
  uint64_t seed_;
  bool shuffle_;
  int64_t epoch_ = -1;  // of order_
  std::vector<int64_t> order_;
};

// A number that changes wholly when either changes (splitmix64).
uint64_t mixed(uint64_t a, uint64_t b);

}  // namespace longstraw::training
