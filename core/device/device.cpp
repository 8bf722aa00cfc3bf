#include "core/device/device.h"

#include "core/base/errors.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

namespace longstraw::core::device {

c10::ScalarType parse_dtype(const std::string& name) {
  if (name == "float64") return c10::kDouble;
  if (name == "float32") return c10::kFloat;
  if (name == "bfloat16") return c10::kBFloat16;
  throw ConfigError(fmt::format("dtype: got '{}', expected float64, float32 or bfloat16", name));
}

std::string dtype_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kDouble: return "float64";
    case c10::kFloat: return "float32";
    case c10::kBFloat16: return "bfloat16";
    default: return c10::toString(dtype);
  }
}

c10::Device parse_device(const std::string& name) {
  if (name == "cpu") return c10::kCPU;
  const bool is_cuda = name == "cuda" || name.rfind("cuda:", 0) == 0;
  if (!is_cuda) throw ConfigError(fmt::format("device: got '{}', expected cpu, cuda or cuda:N", name));
  c10::Device device(c10::kCUDA, 0);
  try {
    const c10::Device parsed(name);
    device.set_index(parsed.has_index() ? parsed.index() : 0);
  } catch (const c10::Error&) {
    throw ConfigError(fmt::format("device: got '{}', expected cpu, cuda or cuda:N", name));
  }
  if (!at::hasCUDA()) {
    throw DeviceError(fmt::format("device {}: no CUDA device here, or a build without CUDA; use device: cpu", name));
  }
  const auto count = at::detail::getCUDAHooks().deviceCount();
  if (device.index() >= count) {
    throw DeviceError(fmt::format("device {}: this machine has {} CUDA device(s)", name, count));
  }
  at::globalContext().lazyInitDevice(c10::kCUDA);
  return device;
}

c10::ScalarType accumulation_dtype(c10::ScalarType dtype) { return dtype == c10::kDouble ? c10::kDouble : c10::kFloat; }

void set_up_determinism(int threads) {
  if (threads > 0) at::set_num_threads(threads);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
  at::globalContext().setAllowTF32CuBLAS(false);
}

}  // namespace longstraw::core::device
