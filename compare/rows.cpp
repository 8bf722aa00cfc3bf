#include "compare/rows.h"

#include <algorithm>

namespace longstraw::compare {

double rows_error(const DiagnosisInput& in, const ParameterMeasure& parameter, const std::vector<RowRange>& rows) {
  constexpr std::int64_t kBlock = 1 << 16;
  const auto b = in.reference.gradient(in.measure.step, parameter.name), a = in.candidate.gradient(in.measure.step, parameter.name);
  const std::int64_t columns = parameter.shape.at(0) == 0 ? 0 : b.info().elements / parameter.shape[0];
  std::vector<double> values_b(kBlock), values_a(kBlock);
  PairStatistics statistics;
  for (const auto& range : rows) {
    const std::int64_t end = (range.first + range.count) * columns;
    for (std::int64_t offset = range.first * columns; offset < end; offset += kBlock) {
      const std::int64_t count = std::min(kBlock, end - offset);
      b.read(offset, count, values_b.data());
      a.read(offset, count, values_a.data());
      accumulate(statistics, offset, values_b.data(), values_a.data(), count);
    }
  }
  return statistics.relative_l2();
}

}  // namespace longstraw::compare
