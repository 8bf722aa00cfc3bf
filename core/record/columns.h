#pragma once
// Columns of a table: datasets of one dimension that grow, a row at the end at a time.

#include <cstdint>
#include <string>

#include "core/record/hdf5.h"

namespace longstraw::core::record {

// An empty one; rows that are not written read as `fill` (null: 0, or an empty text).
void create_column(hid_t group, const std::string& name, hid_t type, const void* fill, const std::string& where);
// Rows [old_count, old_count + added).
void append_values(hid_t group, const std::string& name, hsize_t old_count, hsize_t added, hid_t memory_type, const void* values,
                   const std::string& where);
// Only the first `count` rows stay.
void keep_rows(hid_t group, const std::string& name, hsize_t count, const std::string& where);

}  // namespace longstraw::core::record
