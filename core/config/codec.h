#pragma once
// How a value of each field type is read from YAML, written to it, and described when it is wrong.
//
//   Codec<T>::wanted(check)              "an integer >= 1", completes "wanted ..."
//   Codec<T>::read(value, check, out)    the problem, or nothing and `out` is set
//   Codec<T>::write(value)               YAML in flow style

#include "core/config/fields.h"
#include "core/config/nearest.h"
#include "core/config/value.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::config {

using Problem = std::optional<std::string>;  // nothing: no problem

// " >= 1", " > 0 and <= 1", or nothing.
std::string range_text(const Check& check);
bool in_range(double value, const Check& check);
// "got X, wanted Y".
std::string got_wanted(const Value& value, const std::string& wanted);

template <class T>
struct Codec;

// What the scalar codecs have in common: a plain scalar, `parse` reads it, the check holds.
template <class T, class Parse>
Problem read_number(const Value& value, const Check& check, const std::string& wanted, Parse parse, T& out) {
  if (value.kind == Value::Kind::kScalar && !value.quoted) {
    if (const auto number = parse(value.text); number && in_range(static_cast<double>(*number), check)) {
      out = static_cast<T>(*number);
      return std::nullopt;
    }
  }
  return got_wanted(value, wanted);
}

template <>
struct Codec<std::int64_t> {
  static std::string wanted(const Check& check) { return "an integer" + range_text(check); }
  static Problem read(const Value& value, const Check& check, std::int64_t& out) {
    return read_number(value, check, wanted(check), parse_int, out);
  }
  static std::string write(std::int64_t value) { return std::to_string(value); }
};

template <>
struct Codec<int> {
  static Check narrowed(Check check) {
    if (check.least < std::numeric_limits<int>::min()) check.least = std::numeric_limits<int>::min();
    if (check.most > std::numeric_limits<int>::max()) check.most = std::numeric_limits<int>::max();
    return check;
  }
  static std::string wanted(const Check& check) { return "an integer" + range_text(check); }
  static Problem read(const Value& value, const Check& check, int& out) {
    return read_number(value, narrowed(check), wanted(check), parse_int, out);
  }
  static std::string write(int value) { return std::to_string(value); }
};

template <>
struct Codec<std::uint64_t> {
  static std::string wanted(const Check& check) {
    return "an integer" + (range_text(check).empty() ? std::string(" >= 0") : range_text(check));
  }
  static Problem read(const Value& value, const Check& check, std::uint64_t& out) {
    return read_number(value, check, wanted(check), parse_uint, out);
  }
  static std::string write(std::uint64_t value) { return std::to_string(value); }
};

template <>
struct Codec<double> {
  static std::string wanted(const Check& check) { return "a number" + range_text(check); }
  static Problem read(const Value& value, const Check& check, double& out) {
    return read_number(value, check, wanted(check), parse_double, out);
  }
  static std::string write(double value) { return write_double(value); }
};

template <>
struct Codec<bool> {
  static std::string wanted(const Check&) { return "true or false"; }
  static Problem read(const Value& value, const Check& check, bool& out) {
    return read_number(value, {}, wanted(check), parse_bool, out);
  }
  static std::string write(bool value) { return write_bool(value); }
};

template <>
struct Codec<Bytes> {
  static std::string wanted(const Check& check) {
    const bool bounded = check.least > 0;
    return "a size such as 512MiB or 8GiB" +
           (bounded ? ", at least " + to_string(Bytes{static_cast<std::int64_t>(check.least)}) : std::string());
  }
  static Problem read(const Value& value, const Check& check, Bytes& out) {
    if (value.kind == Value::Kind::kScalar) {
      if (const auto bytes = parse_bytes(value.text); bytes && in_range(static_cast<double>(bytes->count), check)) {
        out = *bytes;
        return std::nullopt;
      }
    }
    return got_wanted(value, wanted(check));
  }
  static std::string write(Bytes value) { return to_string(value); }
};

template <>
struct Codec<std::string> {
  static std::string wanted(const Check& check) { return check.accepts ? std::string(check.wanted) : "a text"; }
  static Problem read(const Value& value, const Check& check, std::string& out) {
    if (value.kind != Value::Kind::kScalar || (check.accepts && !check.accepts(value.text))) {
      return got_wanted(value, wanted(check));
    }
    out = value.text;
    return std::nullopt;
  }
  static std::string write(const std::string& value) { return write_text(value); }
};

template <NamedEnum E>
struct Codec<E> {
  static std::vector<std::string> names() {
    std::vector<std::string> all;
    for (const auto& entry : names_of(E{})) all.emplace_back(entry.name);
    return all;
  }
  static std::string wanted(const Check&) {
    std::string text = "one of ";
    for (const std::string& name : names()) text += (text.size() > 7 ? ", " : "") + name;
    return text;
  }
  static Problem read(const Value& value, const Check& check, E& out) {
    if (value.kind == Value::Kind::kScalar || value.kind == Value::Kind::kNull) {
      // A bare null may be one of the names.
      if (const auto known = value_named<E>(value.kind == Value::Kind::kNull ? "null" : value.text)) {
        out = *known;
        return std::nullopt;
      }
      if (const auto near = nearest(value.text, names())) {
        return got_wanted(value, wanted(check)) + "; did you mean " + *near + "?";
      }
    }
    return got_wanted(value, wanted(check));
  }
  static std::string write(E value) { return write_text(name_of(value)); }
};

template <class T>
struct Codec<std::optional<T>> {
  static std::string wanted(const Check& check) { return Codec<T>::wanted(check) + ", or null"; }
  static Problem read(const Value& value, const Check& check, std::optional<T>& out) {
    if (value.kind == Value::Kind::kNull) {
      out.reset();
      return std::nullopt;
    }
    T inner{};
    Problem problem = Codec<T>::read(value, check, inner);
    if (!problem) out = std::move(inner);
    return problem;
  }
  static std::string write(const std::optional<T>& value) { return value ? Codec<T>::write(*value) : "null"; }
};

template <class T>
struct Codec<std::vector<T>> {
  static std::string wanted(const Check& check) { return "a list, each " + Codec<T>::wanted(check); }
  // A single value is a list of one.
  static Problem read(const Value& value, const Check& check, std::vector<T>& out) {
    const bool single = value.kind == Value::Kind::kScalar;
    if (!single && value.kind != Value::Kind::kList) return got_wanted(value, wanted(check));
    std::vector<T> all;
    for (const Value& item : single ? std::vector<Value>{value} : value.items) {
      T element{};
      if (Problem problem = Codec<T>::read(item, check, element)) {
        return (single ? "" : "element " + std::to_string(all.size()) + ": ") + *problem;
      }
      all.push_back(std::move(element));
    }
    out = std::move(all);
    return std::nullopt;
  }
  static std::string write(const std::vector<T>& value) {
    std::string text;
    for (const T& element : value) text += (text.empty() ? "" : ", ") + Codec<T>::write(element);
    return "[" + text + "]";
  }
};

}  // namespace longstraw::core::config
