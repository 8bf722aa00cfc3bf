#pragma once
// Measures a cell of the study from two gradients in memory, and prints studies as tables. The file is core/record/study.h.

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/record/study.h"

namespace longstraw::compare {

// Collects parameters one by one, in any order; memory is a few sums for each layer, kind, and kind in a layer.
//
//   StudyMeasurement measurement;
//   for (name : parameters) measurement.add(name, reference[name], candidate[name]);
//   cell.rows = measurement.rows();
class StudyMeasurement {
 public:
  StudyMeasurement();
  ~StudyMeasurement();
  StudyMeasurement(StudyMeasurement&&) noexcept;

  // `name` is the checkpoint's; elements in the same order on both sides. ConfigError when the sizes differ or the name came
  // before.
  void add(const std::string& name, std::span<const float> reference, std::span<const float> candidate);
  void add(const std::string& name, std::span<const double> reference, std::span<const double> candidate);

  // Whole model; by layer; by kind; by kind in each layer (and outside the layers). In this order, each sorted.
  std::vector<core::record::StudyRow> rows() const;

 private:
  template <class T>
  void add_values(const std::string& name, std::span<const T> reference, std::span<const T> candidate);
  struct Sums;
  std::unique_ptr<Sums> sums_;
};

enum class TableStyle { kText, kMarkdown };

// One line a cell, the tails of one batch below each other; columns that have one value in all cells are said once, above the
// table.
std::string study_table(std::vector<core::record::StudyCell> cells, TableStyle style = TableStyle::kText);
// One line a layer or a kind of one cell. `scope` is kLayer or kKind.
std::string study_breakdown(const core::record::StudyCell& cell, core::record::StudyScope scope,
                            TableStyle style = TableStyle::kText);

}  // namespace longstraw::compare
