#pragma once
// Names of devices and dtypes as users write them, and the switches that make a run repeat bit for bit.

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>

namespace longstraw::core::device {

// "float64" | "float32" | "bfloat16". Throws ConfigError for another name.
c10::ScalarType parse_dtype(const std::string& name);
std::string dtype_name(c10::ScalarType dtype);

// "cpu" | "cuda" | "cuda:N". Throws ConfigError for another name, DeviceError for a device that is not there.
c10::Device parse_device(const std::string& name);

// float64 for float64, otherwise float32: the dtype in which gradients, adjoints and statistics are accumulated.
c10::ScalarType accumulation_dtype(c10::ScalarType dtype);

// `threads` = 0 leaves LibTorch's choice. Turns on deterministic algorithms and turns off TF32.
void set_up_determinism(int threads);

}  // namespace longstraw::core::device
