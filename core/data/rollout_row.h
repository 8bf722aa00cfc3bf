#pragma once
// One line of a rollouts file: one completion, or a whole group (docs/rollouts.md).

#include "core/data/json_lines.h"
#include "core/data/rollouts.h"

#include <set>
#include <string>
#include <vector>

namespace longstraw::core::data {

struct RolloutRow {
  std::string prompt_id;
  std::vector<std::int64_t> prompt_ids;
  std::vector<Response> responses;         // one, or the group's
  std::set<std::string> optional_columns;  // those of ours that the line has
  std::vector<std::string> other_columns;  // not ours, ignored
};

// Reads and checks what can be checked on one line alone; throws FormatError naming file, line, key and value.
RolloutRow parse_rollout_row(const std::string& line, const Place& place, const RolloutLimits& limits);

}  // namespace longstraw::core::data
