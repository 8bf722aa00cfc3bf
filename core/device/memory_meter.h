#pragma once
// Bytes of tensors alive on a device and their high-water mark, counted the same way on CPU as CUDA counts: what the
// allocator has handed out, each block rounded up to 512 bytes; not the size of the process.

#include <c10/core/Device.h>

#include <cstdint>

namespace longstraw::core::device {

// Replaces LibTorch's CPU allocator by one that counts and that reuses large blocks. Call once, first
// thing in main (tensors made before are not counted). Further calls do nothing.
void install_counting_allocator();

class MemoryMeter {
 public:
  explicit MemoryMeter(c10::Device device) : device_(device) {}
  int64_t live_bytes() const;
  int64_t peak_bytes() const;  // since the last reset_peak(), or since the start
  void reset_peak() const;     // the mark falls to what is alive now

 private:
  c10::Device device_;
};

}  // namespace longstraw::core::device
