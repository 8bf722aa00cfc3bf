#pragma once
// Relative error of some rows of a gradient: families stack projections with different uses in one matrix.

#include <cstdint>
#include <vector>

#include "compare/deviations.h"

namespace longstraw::compare {

// Rows [first, first + count) of a gradient whose first dimension is `shape[0]`.
struct RowRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// |candidate - reference| / |reference| over these rows, 0 where both are zero; a non-finite element makes it infinite.
double rows_error(const DiagnosisInput& input, const ParameterMeasure& parameter, const std::vector<RowRange>& rows);

}  // namespace longstraw::compare
