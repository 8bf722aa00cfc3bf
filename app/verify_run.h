#pragma once
// The arms of `longstraw verify` on one batch, each written as a record.

#include "app/arms.h"
#include "app/config.h"
#include "app/progress.h"

#include "compare/verify_report.h"
#include "core/data/rollouts.h"
#include "core/model/decoder.h"

#include <filesystem>
#include <memory>

namespace longstraw::app {

// Runs reference, detached, tail and exact on `batch`, then the reference once more with less rounding: in float64 for a
// float32 run, in float32 for a bfloat16 run; a float64 run repeats it with the other attention instead. Writes
// reference.h5, detached.h5, tail.h5, exact.h5 and noise.h5 into `folder`. One arm's gradient is in memory at a time, and
// one decoder. FailedRunning (Error) if an arm has changed a weight or the batch: those are the same for all.
compare::VerifyInputs run_arms(const RunConfig& config, std::unique_ptr<core::model::Decoder> decoder,
                               const core::data::Batch& batch, const std::filesystem::path& folder, Progress& progress);

}  // namespace longstraw::app
