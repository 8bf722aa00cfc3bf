#include "core/config/bytes.h"

#include <array>
#include <charconv>
#include <cmath>
#include <limits>

namespace longstraw::core::config {
namespace {

struct Unit {
  std::string_view name;
  std::int64_t bytes;
};
constexpr std::array kUnits = {
    Unit{"", 1},
    Unit{"B", 1},
    Unit{"kB", 1000},
    Unit{"KB", 1000},
    Unit{"MB", 1000'000},
    Unit{"GB", 1000'000'000},
    Unit{"TB", 1000'000'000'000},
    Unit{"KiB", 1LL << 10},
    Unit{"MiB", 1LL << 20},
    Unit{"GiB", 1LL << 30},
    Unit{"TiB", 1LL << 40},
    Unit{"K", 1LL << 10},
    Unit{"M", 1LL << 20},
    Unit{"G", 1LL << 30},
    Unit{"T", 1LL << 40},
};

std::string_view trimmed(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  return text;
}

}  // namespace

std::optional<Bytes> parse_bytes(std::string_view text) {
  text = trimmed(text);
  const auto unit_at = [&](const char* end) { return trimmed({end, static_cast<std::size_t>(text.data() + text.size() - end)}); };
  const auto size_of = [](std::string_view name) -> std::optional<std::int64_t> {
    for (const Unit& unit : kUnits) {
      if (unit.name == name) return unit.bytes;
    }
    return std::nullopt;
  };
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

  std::int64_t whole = 0;
  const auto as_whole = std::from_chars(text.data(), text.data() + text.size(), whole);
  if (as_whole.ec == std::errc{}) {
    if (const auto unit = size_of(unit_at(as_whole.ptr))) {
      if (whole < 0 || whole > kMost / *unit) return std::nullopt;
      return Bytes{whole * *unit};
    }
  }
  double number = 0.0;
  const auto as_double = std::from_chars(text.data(), text.data() + text.size(), number);
  if (as_double.ec != std::errc{}) return std::nullopt;
  const auto unit = size_of(unit_at(as_double.ptr));
  if (!unit) return std::nullopt;
  const double bytes = std::floor(number * static_cast<double>(*unit));
  if (!(bytes >= 0.0 && bytes < 0x1p63)) return std::nullopt;
  return Bytes{static_cast<std::int64_t>(bytes)};
}

std::string to_string(Bytes bytes) {
  constexpr std::array kBinary = {Unit{"TiB", 1LL << 40}, Unit{"GiB", 1LL << 30}, Unit{"MiB", 1LL << 20}, Unit{"KiB", 1LL << 10}};
  for (const Unit& unit : kBinary) {
    if (bytes.count != 0 && bytes.count % unit.bytes == 0) {
      return std::to_string(bytes.count / unit.bytes) + std::string(unit.name);
    }
  }
  return std::to_string(bytes.count);
}

}  // namespace longstraw::core::config
