#pragma once
// Runs the cells of `longstraw study` for one model. For each batch the whole gradient is taken once, by LongStraw's exact
// arm, and stays in memory as what the others are measured against (a cell's `reference`); then one arm at a time:
// `detached`, `tail`, and, for the tail that keeps everything, `exact` once more with other segment borders: as far as that
// is from the first, rounding alone reaches. Where the prompt is short enough, the full-graph reference is run as well; its
// distance is in the cells' numbers.

#include "app/arms.h"
#include "app/config.h"
#include "app/progress.h"
#include "app/study_data.h"
#include "app/study_grid.h"

#include "compare/study.h"
#include "core/model/decoder.h"
#include "core/record/study.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace longstraw::app {

struct StudyRunOptions {
  RunConfig config;            // of this model
  std::string model_name;      // as the cells' keys have it
  int64_t check_tokens = 256;  // longest prompt for which the full-graph reference is run
  bool layer_and_kind = true;  // keep the rows of each kind in each layer
};

// A cell's key; `tail_tokens` as StudyPoint::tails has it.
core::record::StudyKey study_key(const RunConfig& config, const std::string& family, const std::string& model_name,
                                 const StudyPoint& point, int64_t tail_tokens);

class StudyRunner {
 public:
  // `finished` is called with each cell once it is in the file. All references must outlive this object.
  StudyRunner(const StudyRunOptions& options, const core::model::Decoder& decoder, StudyData& data,
              core::record::StudyWriter& writer, Progress& progress, std::function<void(const core::record::StudyCell&)> finished);

  // Computes the cells of `point` that the file lacks. FormatError when it holds one that was made from other inputs.
  // False: the whole gradient is farther from the full-graph reference than its dtype explains.
  bool run(const StudyPoint& point);

 private:
  struct Baseline;
  Baseline baseline_of(const core::data::Batch& batch, const StudyPoint& point);
  core::model::StepGradient run_tail(const core::data::Batch& batch, const StudyPoint& point, int64_t tail_tokens);
  compare::StudyMeasurement measure(const core::model::StepGradient& reference, const core::model::StepGradient& candidate) const;
  core::record::StudyKey key_of(const StudyPoint& point, int64_t tail_tokens) const;
  bool within_bound(double relative_l2) const;

  const StudyRunOptions& options_;
  const core::model::Decoder& decoder_;
  StudyData& data_;
  core::record::StudyWriter& writer_;
  Progress& progress_;
  std::function<void(const core::record::StudyCell&)> finished_;
};

}  // namespace longstraw::app
