#pragma once
// Tiny models of every family, for tests that must hold for all of them.

#include <nlohmann/json.hpp>

#include <ostream>
#include <string>
#include <vector>

namespace longstraw::test {

struct Family {
  std::string name;
  nlohmann::json config;  // complete
};
inline void PrintTo(const Family& family, std::ostream* out) { *out << family.name; }  // GoogleTest's messages

// The smallest models: the configs of fixtures/golden, one or more a family, layouts of the file left out.
std::vector<Family> small_families();

// The same kinds of layers, wide enough that roundings average out (D 64, V 96, heads of 16), without dense families.
std::vector<Family> wide_families();

// The same model without discrete choices: every expert is chosen, every key selected.
nlohmann::json without_choices(nlohmann::json config);

}  // namespace longstraw::test
