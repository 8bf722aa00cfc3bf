#include "core/config/codec.h"

#include <fmt/format.h>

#include <cmath>

namespace longstraw::core::config {

std::string range_text(const Check& check) {
  std::string text;
  if (std::isfinite(check.least)) text += fmt::format(" {} {}", check.least_excluded ? ">" : ">=", check.least);
  if (std::isfinite(check.most)) text += fmt::format("{} <= {}", text.empty() ? "" : " and", check.most);
  return text;
}

bool in_range(double value, const Check& check) {
  return (check.least_excluded ? value > check.least : value >= check.least) && value <= check.most;
}

std::string got_wanted(const Value& value, const std::string& wanted) { return "got " + describe(value) + ", wanted " + wanted; }

}  // namespace longstraw::core::config
