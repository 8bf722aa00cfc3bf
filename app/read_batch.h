#pragma once
// The batch that data.rollouts names, checked against the vocabulary of the checkpoint.

#include "app/config.h"

#include "core/data/rollouts.h"

namespace longstraw::app {

// Reads no weights. ConfigError when a key is missing, FormatError for unusable rollouts or config.json.
core::data::Batch read_batch(const RunConfig& config);

// Number of tokens a model knows, from its config.json. ConfigError without model.path.
int64_t vocabulary(const RunConfig& config);

}  // namespace longstraw::app
