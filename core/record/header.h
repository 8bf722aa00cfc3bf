#pragma once
// The root attributes of a record, and the names of its steps.

#include <cstdint>
#include <string>

#include "core/record/hdf5.h"
#include "core/record/record.h"

namespace longstraw::core::record {

// With `closed` 0. ConfigError when an extra attribute has a name of the header's own.
void write_header(hid_t file, const RecordHeader& header, const std::string& where);
// The same in place of what is there.
void replace_header(hid_t file, const RecordHeader& header, const std::string& where);
// FormatError for another kind of file, a newer format, an attribute that is missing or of another type.
RecordHeader read_header(hid_t file, const std::string& where);
// FormatError naming what of the inputs that a record fixes (arm, model_sha256, data_sha256, seed, dtype) is another.
void check_same_inputs(const RecordHeader& there, const RecordHeader& wanted, const std::string& where);

// The number of step group `name`. FormatError when it is none.
std::int64_t step_number(const std::string& name, const std::string& where);

}  // namespace longstraw::core::record
