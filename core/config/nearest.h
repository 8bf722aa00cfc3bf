#pragma once
// "Did you mean ...?": the nearest of some known words.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::core::config {

// Letters to insert, drop, replace or swap with a neighbour to get from `a` to `b`; upper and lower case, and - and _,
// count as the same.
std::size_t edit_distance(std::string_view a, std::string_view b);

// The candidate at the smallest distance from `word`, the first of equals; nothing when all are further than a third of
// the longer word's length (at least 1): then they are other words rather than slips of the pen.
std::optional<std::string> nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace longstraw::core::config
