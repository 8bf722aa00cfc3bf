#pragma once
// A sketch stands in for a gradient that is too large to keep: a seeded random projection (count sketch) and exact sums.
//
//   bucket[h(i)] += s(i) * g_i        h: element -> [0, d), s: element -> {-1, +1}, both drawn from a hash of
//                                     (seed, parameter name, i); the same on every machine
//
// E <Sa, Sb> = <a, b>, with standard deviation at most sqrt(2/d) |a| |b| (Charikar, Chen, Farach-Colton 2002; Weinberger et
// al. 2009). The projection is linear: sketches of parts of a gradient add up, also over ranks. Norm and counts are exact.

#include <cstdint>
#include <string>
#include <vector>

namespace longstraw::core::record {

inline constexpr std::int64_t kSketchBuckets = 4096;

struct Sketch {
  std::vector<std::int64_t> shape;  // of the gradient
  std::uint64_t seed = 0;
  std::vector<double> buckets;  // finite elements only
  double squared_norm = 0;      // of the finite elements, exact
  std::int64_t nonfinite = 0;

  double norm() const;
  bool operator==(const Sketch&) const = default;
};

// Adds elements in any split into blocks; `offset` is the index of the first in the row-major gradient.
class Sketcher {
 public:
  Sketcher(const std::string& name, std::vector<std::int64_t> shape, std::uint64_t seed, std::int64_t buckets = kSketchBuckets);
  void add(std::int64_t offset, const float* values, std::int64_t count);
  void add(std::int64_t offset, const double* values, std::int64_t count);
  const Sketch& result() const { return sketch_; }

 private:
  template <class T>
  void add_values(std::int64_t offset, const T* values, std::int64_t count);

  std::uint64_t key_;
  Sketch sketch_;
};

// Estimates of <a, b> and |a - b| from two sketches of one parameter. ConfigError when their projections differ.
double inner_product(const Sketch& a, const Sketch& b);
double distance(const Sketch& a, const Sketch& b);

}  // namespace longstraw::core::record
