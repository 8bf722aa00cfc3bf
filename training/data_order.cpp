#include "training/data_order.h"

#include "core/base/errors.h"

#include <numeric>
#include <random>
#include <utility>

namespace longstraw::training {

uint64_t mixed(uint64_t a, uint64_t b) {
  uint64_t z = a + 0x9E3779B97F4A7C15ull * (b + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

DataOrder::DataOrder(int64_t rows, uint64_t seed, bool shuffle) : rows_(rows), seed_(seed), shuffle_(shuffle) {
  if (rows < 1) throw FormatError("the data set has no prompt, wanted at least one");
}

int64_t DataOrder::take(DataPosition& at) {
  if (at.taken >= rows_) at = {at.epoch + 1, 0};
  if (epoch_ != at.epoch) {
    epoch_ = at.epoch;
    order_.resize(size_t(rows_));
    std::iota(order_.begin(), order_.end(), int64_t{0});
    // Not std::shuffle: its order differs between standard libraries, mt19937_64's numbers do not.
    std::mt19937_64 random(mixed(seed_, uint64_t(epoch_)));
    for (int64_t last = rows_ - 1; shuffle_ && last > 0; --last) {
      const auto other = int64_t(random() % uint64_t(last + 1));  // off uniform by less than rows / 2^64
      std::swap(order_[size_t(last)], order_[size_t(other)]);
    }
  }
  return order_[size_t(at.taken++)];
}

}  // namespace longstraw::training
