#pragma once
// The field list of a config struct: from this one list come loading, dumping, comparing and the help text
// (core/config/load.h). A section is a plain struct with defaults and, under them, its list:
//
//   struct TailConfig {
//     std::int64_t tail_tokens = 0;
//     double temperature = 1.0;
//
//     static constexpr auto fields() {
//       using C = TailConfig;
//       return std::tuple{
//           field("tail_tokens", &C::tail_tokens, "prompt tokens that keep their gradient", at_least(0)),
//           field("temperature", &C::temperature, "divides the logits", above(0)),
//       };
//     }
//     bool operator==(const TailConfig&) const = default;
//   };
//
// The comment at each field is the help text in the list, so that readers of the header and of --help read the same
// words. Field types: bool, int, std::int64_t, std::uint64_t, double, std::string, Bytes, an enum with a name table
// (enums.h), std::optional<T> (null in YAML), std::vector<T>, and another struct that has fields().
// This header is light and constexpr: a section's header costs its users nothing.

#include "core/config/bytes.h"
#include "core/config/enums.h"

#include <limits>
#include <string_view>
#include <tuple>

namespace longstraw::core::config {

// What a value must satisfy beyond its type. For an optional it applies to the value inside, for a list to each element.
struct Check {
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  bool least_excluded = false;
  bool (*accepts)(std::string_view) = nullptr;  // for texts
  std::string_view wanted = {};                 // completes "wanted ..." where `accepts` refuses
};

constexpr Check anything() { return {}; }
constexpr Check at_least(double least) { return {.least = least}; }
constexpr Check above(double least) { return {.least = least, .least_excluded = true}; }
constexpr Check between(double least, double most) { return {.least = least, .most = most}; }
constexpr Check above_up_to(double least, double most) { return {.least = least, .most = most, .least_excluded = true}; }
constexpr Check text_that(bool (*accepts)(std::string_view), std::string_view wanted) {
  return {.accepts = accepts, .wanted = wanted};
}

template <class Struct, class T>
struct Field {
  std::string_view name;
  T Struct::*member;
  std::string_view help;
  Check check;
};

template <class Struct, class T>
constexpr Field<Struct, T> field(std::string_view name, T Struct::*member, std::string_view help, Check check = {}) {
  return {name, member, help, check};
}

template <class T>
concept Section = requires {
  T::fields();
};

}  // namespace longstraw::core::config
