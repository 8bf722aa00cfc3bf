#pragma once
// A decoder over tokens run together: from ids to hidden states.

#include "core/model/decoder.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace longstraw {

// ids and their absolute positions, S of each -> [S, D] after the final norm. Without an output, the last layer
// with a state only makes it, those after it don't run, and an undefined tensor comes back.
at::Tensor run_layers(const core::model::Decoder& decoder, const std::vector<int64_t>& ids, const std::vector<int64_t>& positions,
                      core::model::SequenceLengths lengths, core::model::Execution& execution, bool with_output);

// first, first + 1, … : `count` positions.
std::vector<int64_t> positions_from(int64_t first, int64_t count);

}  // namespace longstraw
