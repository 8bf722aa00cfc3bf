#pragma once
// A config struct's field list, bound to one object, with its types forgotten: what loading, dumping and help walk over.

#include "core/config/codec.h"
#include "core/config/fields.h"

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::core::config {

struct Binding {
  std::string name;
  std::string help;
  std::vector<Binding> children;              // of a section; empty for a single value
  std::string wanted;                         // of a single value: its type, range or names
  std::function<Problem(const Value&)> read;  // sets the bound object's field
  std::function<std::string()> write;         // the bound object's field as YAML

  bool is_section() const { return !read; }
};

template <Section C>
std::vector<Binding> bind(C& config);

template <class T>
Binding bind_field(std::string_view name, std::string_view help, const Check& check, T& value) {
  Binding binding{.name = std::string(name), .help = std::string(help), .children = {}, .wanted = {}, .read = {}, .write = {}};
  if constexpr (Section<T>) {
    binding.children = bind(value);
  } else {
    binding.wanted = Codec<T>::wanted(check);
    binding.read = [&value, check](const Value& given) { return Codec<T>::read(given, check, value); };
    binding.write = [&value] { return Codec<T>::write(value); };
  }
  return binding;
}

// The bindings refer to `config`: they must not outlive it.
template <Section C>
std::vector<Binding> bind(C& config) {
  std::vector<Binding> all;
  std::apply(
      [&](const auto&... field) { (all.push_back(bind_field(field.name, field.help, field.check, config.*field.member)), ...); },
      C::fields());
  return all;
}

}  // namespace longstraw::core::config
