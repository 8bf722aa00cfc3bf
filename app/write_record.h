#pragma once
// Writes one step's gradient as a record (docs/record.md).

#include "app/config.h"

#include "core/data/rollouts.h"
#include "core/model/decoder.h"
#include "core/model/step_gradient.h"

#include <filesystem>
#include <string>

namespace longstraw::app {

struct RecordedStep {
  std::string arm;
  const RunConfig& config;  // as the arm was run
  const core::model::Decoder& decoder;
  const core::data::Batch& batch;
  const core::model::StepGradient& result;
};

// Replaces a record at `path` when the new one is whole; signals wait meanwhile.
void write_record(const std::filesystem::path& path, const RecordedStep& step);

}  // namespace longstraw::app
