#pragma once
// The /rewards table: one extensible column a field, one row a response. A reward part that first appears later reads as
// missing (NaN) in the earlier rows, and so does a part that a row does not have.

#include <cstdint>
#include <string>
#include <vector>

#include "core/record/hdf5.h"
#include "core/record/record.h"

namespace longstraw::core::record {

void append_reward_rows(hid_t file, const std::vector<RewardRow>& rows, const std::string& where);
// Rows of step `from_step` and later go.
void drop_reward_rows(hid_t file, std::int64_t from_step, const std::string& where);
std::vector<RewardRow> read_reward_rows(hid_t file, const std::string& where);

}  // namespace longstraw::core::record
