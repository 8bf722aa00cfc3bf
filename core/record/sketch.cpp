#include "core/record/sketch.h"

#include <fmt/format.h>

#include <cmath>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/base/errors.h"

namespace longstraw::core::record {
namespace {

// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

void require_same_projection(const Sketch& a, const Sketch& b) {
  if (a.seed != b.seed || a.buckets.size() != b.buckets.size() || a.shape != b.shape) {
    throw ConfigError(fmt::format("two sketches of different projections: seed {} and {}, {} and {} buckets", a.seed, b.seed,
                                  a.buckets.size(), b.buckets.size()));
  }
}

}  // namespace

double Sketch::norm() const { return std::sqrt(squared_norm); }

Sketcher::Sketcher(const std::string& name, std::vector<std::int64_t> shape, std::uint64_t seed, std::int64_t buckets)
    : key_(XXH64(name.data(), name.size(), seed)) {
  if (buckets <= 0 || (buckets & (buckets - 1)) != 0) {
    throw ConfigError(fmt::format("sketch of {}: {} buckets, expected a power of two", name, buckets));
  }
  sketch_.shape = std::move(shape);
  sketch_.seed = seed;
  sketch_.buckets.assign(static_cast<std::size_t>(buckets), 0.0);
}

template <class T>
void Sketcher::add_values(std::int64_t offset, const T* values, std::int64_t count) {
  const std::uint64_t mask = sketch_.buckets.size() - 1;
  double squares = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<double>(values[i]);
    if (!std::isfinite(value)) {
      ++sketch_.nonfinite;
      continue;
    }
    const std::uint64_t hash = mixed(key_ + static_cast<std::uint64_t>(offset + i));
    // Disjoint bits choose the sign and the bucket.
    sketch_.buckets[hash & mask] += (hash >> 63) != 0 ? value : -value;
    squares += value * value;
  }
  sketch_.squared_norm += squares;
}

void Sketcher::add(std::int64_t offset, const float* values, std::int64_t count) { add_values(offset, values, count); }
void Sketcher::add(std::int64_t offset, const double* values, std::int64_t count) { add_values(offset, values, count); }

double inner_product(const Sketch& a, const Sketch& b) {
  require_same_projection(a, b);
  double sum = 0;
  for (std::size_t i = 0; i < a.buckets.size(); ++i) sum += a.buckets[i] * b.buckets[i];
  return sum;
}

double distance(const Sketch& a, const Sketch& b) {
  require_same_projection(a, b);
  double sum = 0;
  for (std::size_t i = 0; i < a.buckets.size(); ++i) {
    const double difference = a.buckets[i] - b.buckets[i];
    sum += difference * difference;
  }
  return std::sqrt(sum);
}

}  // namespace longstraw::core::record
