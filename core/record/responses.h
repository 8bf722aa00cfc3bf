#pragma once
// The responses of a step as flat arrays with offsets, so that ragged data needs neither padding nor one dataset each.
// Response i has the elements offsets[i] to offsets[i+1] of `tokens`, `mask` and each log-prob array.

#include <string>
#include <vector>

#include "core/record/hdf5.h"
#include "core/record/record.h"

namespace longstraw::core::record {

// ConfigError when an array's length is not the number of tokens, or when log-probs or a trace's points are present in some
// responses only.
void check_response(const ResponseRecord& response, const std::string& where);
void write_responses(hid_t step_group, const std::vector<ResponseRecord>& responses, const std::string& where);
// Empty when the step has no responses. FormatError when the arrays do not fit together.
std::vector<ResponseRecord> read_responses(hid_t step_group, const std::string& where);

}  // namespace longstraw::core::record
