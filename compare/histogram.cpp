#include "compare/histogram.h"

#include <algorithm>
#include <cmath>

namespace longstraw::compare {

void LogHistogram::add(const double* magnitudes, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) add(magnitudes[i]);
}

void LogHistogram::grow(std::uint64_t low, std::uint64_t high) {
  constexpr std::uint64_t kMargin = 64;  // four octaves, so that neighbours rarely grow it again
  const std::uint64_t begin = low < kMargin ? 0 : low - kMargin;
  const std::uint64_t end = high + kMargin + 1;
  if (counts_.empty()) {
    first_ = begin;
    counts_.assign(end - begin, 0);
    return;
  }
  const std::uint64_t new_begin = std::min(first_, begin);
  const std::uint64_t new_end = std::max(first_ + counts_.size(), end);
  std::vector<std::uint64_t> counts(new_end - new_begin, 0);
  std::copy(counts_.begin(), counts_.end(), counts.begin() + static_cast<std::ptrdiff_t>(first_ - new_begin));
  counts_ = std::move(counts);
  first_ = new_begin;
}

void LogHistogram::merge(const LogHistogram& other) {
  zeros_ += other.zeros_;
  if (other.counts_.empty()) return;
  const std::uint64_t last = other.first_ + other.counts_.size() - 1;
  if (counts_.empty() || other.first_ < first_ || last >= first_ + counts_.size()) grow(other.first_, last);
  std::uint64_t* to = counts_.data() + (other.first_ - first_);
  for (std::size_t i = 0; i < other.counts_.size(); ++i) to[i] += other.counts_[i];
}

std::uint64_t LogHistogram::count() const {
  std::uint64_t total = zeros_;
  for (const std::uint64_t n : counts_) total += n;
  return total;
}

double LogHistogram::quantile(double q) const {
  const auto total = static_cast<double>(count());
  const double wanted = q * total;
  auto seen = static_cast<double>(zeros_);
  if (seen >= wanted) return 0;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    seen += static_cast<double>(counts_[i]);
    if (seen >= wanted) return std::bit_cast<double>((first_ + i + 1) << kShift);
  }
  return 0;
}

}  // namespace longstraw::compare
