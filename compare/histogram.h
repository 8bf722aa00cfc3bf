#pragma once
// Counts of magnitudes in logarithmic buckets, 16 to an octave, over the whole range of double: quantiles of streamed values
// to within 1/16 of their size, mergeable in any order.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace longstraw::compare {

class LogHistogram {
 public:
  // `magnitude` is finite and not negative.
  void add(double magnitude) { add_bits(std::bit_cast<std::uint64_t>(magnitude)); }
  void add(const double* magnitudes, std::size_t count);
  void merge(const LogHistogram& other);

  std::uint64_t count() const;
  // The smallest bucket edge that at least share `q` of the values do not exceed; 0 without values. It may overstate the
  // quantile by 1/16, never understate it. Quantile 1 is better taken from an exact maximum.
  double quantile(double q) const;

 private:
  static constexpr int kShift = 52 - 4;  // keep sign (always 0), exponent and four bits of the mantissa

  void add_bits(std::uint64_t bits) {
    if (bits == 0) {
      ++zeros_;
      return;
    }
    const std::uint64_t bucket = bits >> kShift;
    if (bucket - first_ >= counts_.size()) grow(bucket, bucket);
    ++counts_[bucket - first_];
  }
  // Makes room for the buckets from `low` to `high`.
  void grow(std::uint64_t low, std::uint64_t high);

  std::uint64_t zeros_ = 0;
  std::uint64_t first_ = 0;  // bucket number of counts_[0]
  std::vector<std::uint64_t> counts_;
};

}  // namespace longstraw::compare
