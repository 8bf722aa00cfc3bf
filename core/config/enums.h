#pragma once
// Names of enum values. An enum that appears in the configuration has, beside it in its namespace, one table:
//
//   enum class Kl { kK1, kK2, kK3 };
//   constexpr auto names_of(Kl) { return std::array{EnumName{Kl::kK1, "k1"}, EnumName{Kl::kK2, "k2"}, ...}; }
//
// found by argument-dependent lookup. YAML, help, messages and records all use it.

#include <array>
#include <optional>
#include <string_view>

namespace longstraw::core::config {

template <class E>
struct EnumName {
  E value;
  std::string_view name;
};
template <class E>
EnumName(E, const char*) -> EnumName<E>;

template <class E>
concept NamedEnum = requires(E value) {
  names_of(value).size();
};

// The name of `value`; "?" for a value outside the table (a cast gone wrong).
template <NamedEnum E>
constexpr std::string_view name_of(E value) {
  for (const auto& entry : names_of(value)) {
    if (entry.value == value) return entry.name;
  }
  return "?";
}

// The value called `name`, exactly as spelled in the table.
template <NamedEnum E>
constexpr std::optional<E> value_named(std::string_view name) {
  for (const auto& entry : names_of(E{})) {
    if (entry.name == name) return entry.value;
  }
  return std::nullopt;
}

}  // namespace longstraw::core::config
