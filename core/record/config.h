#pragma once
// Section `record`: what a record keeps besides gradients, responses and figures.

#include "core/config/fields.h"

namespace longstraw::core::record {

struct RecordConfig {
  bool trace = false;

  static constexpr auto fields() {
    using namespace config;
    using C = RecordConfig;
    return std::tuple{
        field("trace", &C::trace, "a number a response token and operation of the forward pass, which tells where two runs part"),
    };
  }
  bool operator==(const RecordConfig&) const = default;
};

}  // namespace longstraw::core::record
