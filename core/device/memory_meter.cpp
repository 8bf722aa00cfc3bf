#include "core/device/memory_meter.h"

#include "core/base/errors.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

namespace longstraw::core::device {
namespace {

constexpr int64_t kCountedGranule = 512;          // what CUDA's caching allocator rounds to
constexpr size_t kLargeBlock = size_t{1} << 20;   // from here on blocks come from mmap in whole large pages
constexpr size_t kLargePage = size_t{2} << 20;
constexpr size_t kCachedLimit = size_t{768} << 20;
constexpr size_t kAlignment = 64;

size_t round_up(size_t n, size_t granule) { return (n + granule - 1) / granule * granule; }

// Counts live bytes, and keeps freed large blocks for the next request of the same size: a fresh block costs a page
// fault for every page, which is a notable share of a forward pass.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &CountingAllocator::release, c10::Device(c10::kCPU)};
    void* data = n >= kLargeBlock ? allocate_large(n) : allocate_small(n);
    const int64_t live = live_ += static_cast<int64_t>(round_up(n, kCountedGranule));
    int64_t peak = peak_;
    while (live > peak && !peak_.compare_exchange_weak(peak, live)) {
    }
    return {data, data, &CountingAllocator::release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &CountingAllocator::release; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }

  int64_t live() const { return live_; }
  int64_t peak() const { return peak_; }
  void reset_peak() { peak_ = live_.load(); }

  static CountingAllocator& instance() {
    static auto* allocator = new CountingAllocator;  // outlives every tensor, static ones too
    return *allocator;
  }

 private:
  static void release(void* data) {
    if (data != nullptr) instance().free_block(data);
  }

  void* allocate_small(size_t n) {
    void* data = nullptr;
    if (posix_memalign(&data, kAlignment, n) != 0) out_of_memory(n);
    const std::lock_guard lock(mutex_);
    sizes_[data] = n;
    return data;
  }

  void* allocate_large(size_t n) {
    const size_t size = round_up(n, kLargePage);
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = cached_.find(size); found != cached_.end()) {
        void* data = found->second;
        cached_.erase(found);
        cached_bytes_ -= size;
        sizes_[data] = n;
        return data;
      }
    }
    // One large page more than asked for, so that the block can start on a large page's border.
    void* raw = mmap(nullptr, size + kLargePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) out_of_memory(n);
    const auto start = reinterpret_cast<uintptr_t>(raw);
    const uintptr_t aligned = round_up(start, kLargePage);
    if (aligned > start) munmap(raw, aligned - start);
    if (const size_t tail = start + kLargePage - aligned; tail > 0) {
      munmap(reinterpret_cast<void*>(aligned + size), tail);
    }
    auto* data = reinterpret_cast<void*>(aligned);
    madvise(data, size, MADV_HUGEPAGE);
    const std::lock_guard lock(mutex_);
    sizes_[data] = n;
    return data;
  }

  void free_block(void* data) {
    size_t n = 0;
    {
      const std::lock_guard lock(mutex_);
      const auto found = sizes_.find(data);
      n = found->second;
      sizes_.erase(found);
      const size_t size = round_up(n, kLargePage);
      if (n >= kLargeBlock && cached_bytes_ + size <= kCachedLimit) {
        cached_.emplace(size, data);
        cached_bytes_ += size;
        data = nullptr;
      }
    }
    live_ -= static_cast<int64_t>(round_up(n, kCountedGranule));
    if (data == nullptr) return;
    if (n >= kLargeBlock) {
      munmap(data, round_up(n, kLargePage));
    } else {
      std::free(data);
    }
  }

  [[noreturn]] void out_of_memory(size_t n) const {
    throw DeviceError(fmt::format("cpu: out of memory asking for {} bytes, with {} in use; a smaller "
                                  "longstraw.segment_tokens or longstraw.memory_budget needs less", n, live_.load()));
  }

  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;   // as asked for
  std::multimap<size_t, void*> cached_;       // free large blocks by their mapped size
  size_t cached_bytes_ = 0;
  std::atomic<int64_t> live_{0};
  std::atomic<int64_t> peak_{0};
};

c10::CachingDeviceAllocator::DeviceStats device_stats(c10::Device device) {
  return c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
}

constexpr size_t kAllPools = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

}  // namespace

void install_counting_allocator() {
  static std::once_flag once;
  std::call_once(once, [] { c10::SetAllocator(c10::kCPU, &CountingAllocator::instance(), /*priority=*/255); });
}

int64_t MemoryMeter::live_bytes() const {
  if (device_.is_cpu()) return CountingAllocator::instance().live();
  return device_stats(device_).allocated_bytes[kAllPools].current;
}

int64_t MemoryMeter::peak_bytes() const {
  if (device_.is_cpu()) return CountingAllocator::instance().peak();
  return device_stats(device_).allocated_bytes[kAllPools].peak;
}

void MemoryMeter::reset_peak() const {
  if (device_.is_cpu()) {
    CountingAllocator::instance().reset_peak();
  } else {
    c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
  }
}

}  // namespace longstraw::core::device
