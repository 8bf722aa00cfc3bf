#pragma once
// The training loop: generations of responses, and optimizer steps on them, until the steps are done or it is told to stop.
//
//   Data data = read_data(settings, hooks);
//   Outcome outcome = train(decoder, data, settings, hooks);
//
// Leaves in train.output_dir: checkpoint-<step>/, metrics.jsonl, record.h5. All that is random is a function of train.seed and of
// positions that checkpoints keep, so a run that was ended in any way goes on bit for bit. Any error (a reward function that dies,
// a server that vanishes, a gradient that is not finite) is thrown on after a checkpoint of the last whole step has been saved.

#include "core/model/decoder.h"
#include "training/data.h"
#include "training/settings.h"

#include <cstdint>
#include <filesystem>
#include <optional>

namespace longstraw::training {

struct Outcome {
  bool interrupted = false;          // saved and left, since it was told to
  int64_t steps = 0;                 // optimizer steps taken, those before a resume too
  std::filesystem::path checkpoint;  // the last
};

// `decoder`: read from settings.model.path, with its adapters. Weights change.
Outcome train(core::model::Decoder& decoder, Data& data, const Settings& settings, const Hooks& hooks);

}  // namespace longstraw::training
