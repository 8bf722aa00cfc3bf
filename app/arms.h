#pragma once
// An arm is one way to get the gradient of a batch: the full-graph reference, or LongStraw keeping none, a tail or all
// of the prompt's gradient.

#include "app/config.h"
#include "app/progress.h"

#include "core/data/rollouts.h"
#include "core/model/decoder.h"
#include "core/model/step_gradient.h"
#include "training/config.h"

#include <cstdint>
#include <memory>
#include <optional>

namespace longstraw::app {

using training::Arm;

// Reads the checkpoint in its dtype on its device, with determinism set up, and puts adapters on it where they are wanted.
// ConfigError without a path.
std::unique_ptr<core::model::Decoder> open_model(const core::model::ModelConfig& config, const core::model::LoraConfig& lora,
                                                 Progress& progress);

// How many prompt tokens keep their gradient in the tail arm: longstraw.tail_tokens, or where that is 0 the last 64, at
// most all the prompt state has.
int64_t tail_tokens(const RunConfig& config, const core::data::Batch& batch);

// `reference_cut`: where the reference cuts the prompt's graph (RunOptions::tail_tokens); only for the reference arm.
core::model::StepGradient run_arm(Arm arm, const core::model::Decoder& decoder, const core::data::Batch& batch,
                                  const RunConfig& config, Progress& progress, std::optional<int64_t> reference_cut = {});

// No response can move a weight: every advantage is zero, and there is no KL term.
bool has_no_gradient(const core::data::Batch& batch, const core::objective::ObjectiveConfig& objective);

}  // namespace longstraw::app
