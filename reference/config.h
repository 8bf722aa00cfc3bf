#pragma once
// Section `reference`: how the full-graph trainer attends.

#include "core/config/fields.h"

namespace longstraw::reference {

enum class Attention { kTextbook, kSdpa };
constexpr auto names_of(Attention) {
  using core::config::EnumName;
  return std::array{EnumName{Attention::kTextbook, "textbook"}, EnumName{Attention::kSdpa, "sdpa"}};
}

struct ReferenceConfig {
  Attention attention = Attention::kTextbook;

  static constexpr auto fields() {
    using namespace core::config;
    using C = ReferenceConfig;
    return std::tuple{
        field("attention", &C::attention, "explicit mask and softmax, or LibTorch's scaled_dot_product_attention"),
    };
  }
  bool operator==(const ReferenceConfig&) const = default;
};

}  // namespace longstraw::reference
