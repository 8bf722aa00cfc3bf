// How fast this machine multiplies float32 matrices through LibTorch: the yardstick of bench/step.py. Prints one line of
// JSON. The best of many runs, so that a share of it is never flattered by a busy machine.

#include "core/device/device.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 0;
  const int64_t size = argc > 2 ? std::atoll(argv[2]) : 2048;
  const double seconds = argc > 3 ? std::atof(argv[3]) : 3.0;
  if (threads < 0 || size < 1 || seconds <= 0) {
    fmt::print(stderr, "usage: longstraw_bench_gemm [THREADS [SIZE [SECONDS]]]\n");
    return 2;
  }
  longstraw::core::device::set_up_determinism(threads);
  const c10::NoGradGuard no_grad;
  const at::Tensor a = at::randn({size, size}), b = at::randn({size, size});
  at::Tensor out = at::mm(a, b);
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  double best = 0.0;
  int64_t runs = 0;
  while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds || runs < 3) {
    const auto start = Clock::now();
    at::mm_out(out, a, b);
    const double took = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, 2.0 * double(size) * double(size) * double(size) / took);
    ++runs;
  }
  fmt::print("{{\"flops_per_second\": {:.6e}, \"size\": {}, \"runs\": {}, \"threads\": {}}}\n", best, size, runs,
             at::get_num_threads());
  return 0;
}
