#pragma once
// YAML text as a small tree that knows its lines, and the reading and writing of single values. No yaml-cpp type leaves
// value.cpp.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::core::config {

struct Value {
  enum class Kind { kNull, kScalar, kList, kMap };

  Kind kind = Kind::kNull;
  std::string text;          // of a scalar
  bool quoted = false;       // "8" is a text, 8 a number
  int line = 0;              // from 1
  std::vector<Value> keys;   // of a map, as they stand there: a key may occur twice
  std::vector<Value> items;  // of a list, or the values of a map, parallel to `keys`
};

struct ParsedYaml {
  Value root;                        // null for an empty text
  std::optional<std::string> fault;  // why the text can't be used; `root` is then null
  int fault_line = 0;
};

// One YAML document. Anchors and aliases are refused: a configuration has no use for them, and they can be made to
// recurse or to grow without end.
ParsedYaml parse_yaml(const std::string& text);

// What a value looks like in a message: its text, shortened, or "a list", "a mapping", "null".
std::string describe(const Value& value);

// Exact readings of a plain scalar's text; nothing when it is something else or out of range.
std::optional<std::int64_t> parse_int(std::string_view text);
std::optional<std::uint64_t> parse_uint(std::string_view text);
std::optional<double> parse_double(std::string_view text);  // finite
std::optional<bool> parse_bool(std::string_view text);

// YAML spellings that parse_yaml and, for readers in other languages, YAML 1.1 parsers read back as the same value.
std::string write_text(std::string_view text);  // quoted where it could be taken for something else
std::string write_double(double value);         // the shortest that gives the same double, never taken for an integer
std::string write_bool(bool value);

}  // namespace longstraw::core::config
