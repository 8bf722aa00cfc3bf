#include "core/device/memory_meter.h"

#include "core/base/errors.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

namespace longstraw::core::device {
namespace {

constexpr int64_t kCountedGranule = 512;         // what CUDA's caching allocator rounds to
constexpr size_t kLargeBlock = size_t{1} << 20;  // from here on blocks come from mmap
constexpr size_t kMapGranule = size_t{256} << 10;
constexpr size_t kCachedSlack = size_t{256} << 20;
constexpr size_t kAlignment = 64;

size_t round_up(size_t n, size_t granule) { return (n + granule - 1) / granule * granule; }

// Counts live bytes, and keeps freed large blocks for later requests of about their size: a fresh block costs the kernel
// a page fault and a zeroing for every page, which is a notable share of a forward pass. What is kept never makes the
// process larger than it was at its own high-water mark, but for a little slack.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &CountingAllocator::release, c10::Device(c10::kCPU)};
    void* data = n >= kLargeBlock ? allocate_large(n) : allocate_small(n);
    const int64_t live = live_ += static_cast<int64_t>(round_up(n, kCountedGranule));
    raise(peak_, live);
    raise(ever_, live);
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
  static void raise(std::atomic<int64_t>& mark, int64_t value) {
    int64_t old = mark;
    while (value > old && !mark.compare_exchange_weak(old, value)) {
    }
  }

  static void release(void* data) {
    if (data != nullptr) instance().free_block(data);
  }

  void* allocate_small(size_t n) {
    void* data = nullptr;
    if (posix_memalign(&data, kAlignment, n) != 0) out_of_memory(n);
    const std::lock_guard lock(mutex_);
    blocks_[data] = {n, 0};
    return data;
  }

  void* allocate_large(size_t n) {
    const size_t size = round_up(n, kMapGranule);
    const std::lock_guard lock(mutex_);
    const auto found = cached_.lower_bound(size);
    if (found != cached_.end() && found->first <= size + size / 4) {
      void* data = found->second;
      blocks_[data] = {n, found->first};
      cached_bytes_ -= found->first;
      cached_.erase(found);
      return data;
    }
    shrink_cache(size);
    void* data = map_large(size, n);
    blocks_[data] = {n, size};
    return data;
  }

  // No large pages: on a machine whose memory is in use the kernel first moves pages together, which was measured to
  // cost several times the page faults that it saves.
  void* map_large(size_t size, size_t n) {
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) out_of_memory(n);
    return data;
  }

  // Gives cached blocks back, the largest first, until `coming` more bytes fit beside what is live.
  void shrink_cache(size_t coming) {
    const auto live = static_cast<size_t>(live_.load()), peak = static_cast<size_t>(ever_.load());
    const size_t limit = std::max(peak, live + coming) + kCachedSlack;
    while (!cached_.empty() && live + coming + cached_bytes_ > limit) {
      const auto largest = std::prev(cached_.end());
      munmap(largest->second, largest->first);
      cached_bytes_ -= largest->first;
      cached_.erase(largest);
    }
  }

  void free_block(void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(data);
    const Block block = found->second;
    blocks_.erase(found);
    live_ -= static_cast<int64_t>(round_up(block.asked, kCountedGranule));
    if (block.mapped == 0) {
      std::free(data);
      return;
    }
    cached_.emplace(block.mapped, data);
    cached_bytes_ += block.mapped;
    shrink_cache(0);
  }

  [[noreturn]] void out_of_memory(size_t n) const {
    throw DeviceError(
        fmt::format("cpu: out of memory asking for {} bytes, with {} in use; a smaller "
                    "longstraw.segment_tokens or longstraw.memory_budget needs less",
                    n, live_.load()));
  }

  std::mutex mutex_;
  struct Block {
    size_t asked;
    size_t mapped;  // 0: from malloc
  };
  std::unordered_map<void*, Block> blocks_;
  std::multimap<size_t, void*> cached_;  // free large blocks by their mapped size
  size_t cached_bytes_ = 0;
  std::atomic<int64_t> live_{0};
  std::atomic<int64_t> peak_{0};  // since the last reset
  std::atomic<int64_t> ever_{0};  // since the start
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
