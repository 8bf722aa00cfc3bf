#pragma once
// Section `model`: which checkpoint, in which dtype, where.

#include "core/config/fields.h"

#include <cstdint>
#include <string>
#include <string_view>

namespace longstraw::core::model {

enum class Dtype { kFloat64, kFloat32, kBfloat16 };
constexpr auto names_of(Dtype) {
  using config::EnumName;
  return std::array{EnumName{Dtype::kFloat64, "float64"}, EnumName{Dtype::kFloat32, "float32"},
                    EnumName{Dtype::kBfloat16, "bfloat16"}};
}

// cpu, cuda or cuda:N.
constexpr bool is_device_name(std::string_view text) {
  if (text == "cpu" || text == "cuda") return true;
  constexpr std::string_view kIndexed = "cuda:";
  if (!text.starts_with(kIndexed)) return false;
  const std::string_view index = text.substr(kIndexed.size());
  if (index.empty() || index.size() > 3) return false;
  for (const char c : index) {
    if (c < '0' || c > '9') return false;
  }
  return true;
}

struct ModelConfig {
  std::string path;
  Dtype dtype = Dtype::kFloat32;
  std::string device = "cpu";
  std::int64_t threads = 0;

  static constexpr auto fields() {
    using namespace config;
    using C = ModelConfig;
    return std::tuple{
        field("path", &C::path, "folder of the Hugging Face checkpoint (config.json, safetensors)"),
        field("dtype", &C::dtype, "dtype of weights and computation"),
        field("device", &C::device, "where to compute", text_that(is_device_name, "cpu, cuda or cuda:N")),
        field("threads", &C::threads, "CPU threads; 0: as many as the machine has", between(0, 4096)),
    };
  }
  bool operator==(const ModelConfig&) const = default;
};

}  // namespace longstraw::core::model
