#pragma once
// A description in JSON as text for people.

#include <nlohmann/json_fwd.hpp>

#include <string>

namespace longstraw::app {

// Objects as indented `key: value` lines; lists of objects as tables; numbers of bytes also in MiB.
std::string readable_text(const nlohmann::ordered_json& value);

}  // namespace longstraw::app
