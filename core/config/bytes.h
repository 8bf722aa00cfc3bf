#pragma once
// A number of bytes that people write as 8GiB.

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace longstraw::core::config {

struct Bytes {
  std::int64_t count = 0;

  constexpr operator std::int64_t() const { return count; }
  friend constexpr auto operator<=>(const Bytes&, const Bytes&) = default;
};

constexpr Bytes gibibytes(std::int64_t n) { return {n << 30}; }

// Reads a number, also with a fraction or an exponent, then an optional unit, with spaces between if one likes:
// B; kB, KB, MB, GB, TB (powers of 1000); KiB, MiB, GiB, TiB, and K, M, G, T alone (powers of 1024). Fractions of a
// byte are dropped. Nothing when the text is something else, is negative, or does not fit into 63 bits.
std::optional<Bytes> parse_bytes(std::string_view text);

// The shortest exact form: 8GiB, 1536MiB, 1000 (always read back as the same number).
std::string to_string(Bytes bytes);

}  // namespace longstraw::core::config
