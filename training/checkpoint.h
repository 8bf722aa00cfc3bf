#pragma once
// Checkpoints of a run, output_dir/checkpoint-<step>/: the weights as a Hugging Face checkpoint (or PEFT adapter), and
// training_state/ with all that a continued run needs to go on bit for bit. A folder is written as checkpoint-<step>.partial and
// renamed when every byte is on the disk; what a killed run left half-made is never taken for a checkpoint, and is removed.
//
//   training_state/state.json                    where the run stands
//   training_state/optimizer.safetensors         Optimizer::state(); its metadata has the steps taken
//   training_state/reference_model.safetensors   weights of a synced reference model, under the decoder's names

#include "core/model/decoder.h"
#include "core/optim/optimizer.h"
#include "core/record/file_io.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::training {

// training_state/state.json. Random draws are functions of (seed, position), so positions are all there is to keep.
struct TrainerState {
  int64_t step = 0;        // optimizer steps taken
  int64_t generation = 0;  // generations begun
  int64_t epoch = 0;
  int64_t position = 0;       // prompts taken in this epoch
  int64_t num_tokens = 0;     // seen so far, as TRL counts
  int64_t metrics_bytes = 0;  // of metrics.jsonl at this step: what came later is cut off at resume
  std::optional<double> best_eval;
  int64_t best_step = -1;
  nlohmann::json extra = nlohmann::json::object();
};

struct CheckpointContents {
  const core::model::Decoder& decoder;
  std::filesystem::path model_source;  // the folder the decoder was read from
  bool adapters = false;               // LoRA: an adapter, not weights
  bool merged = false;                 // and beside it the merged weights, in merged/
  const core::optim::Optimizer& optimizer;
  const core::model::Decoder* reference_model = nullptr;  // a synced one changes: it is kept too
  TrainerState state;
};

class CheckpointStore {
 public:
  // Makes `folder` where it is missing, locks it (IoError when another run works in it) and removes what a killed writer left.
  CheckpointStore(std::filesystem::path folder, int64_t keep_last, bool keep_best);

  // The newest whole one; nothing when there is none.
  std::optional<std::filesystem::path> newest() const;
  // Writes <folder>/checkpoint-<step> (in the place of one of that step), then removes those that are no longer kept: all but the
  // last `keep_last` (0: none is removed) and, with `keep_best`, that of state.best_step. IoError (disk full) leaves the older ones
  // as they were. `before_write` is called between changes of the disk; for tests.
  std::filesystem::path save(const CheckpointContents& contents, const std::function<void()>& before_write = {});

 private:
  void remove_old(int64_t saved, int64_t best, const std::function<void()>& before_write) const;

  std::filesystem::path folder_;
  core::record::Descriptor lock_;
  int64_t keep_last_;
  bool keep_best_;
};

// Both: FormatError naming file and what is wrong: missing, cut short, of another model, of other sizes.
TrainerState read_trainer_state(const std::filesystem::path& checkpoint);
// Weights (of a full run) or adapters, optimizer and a synced reference model back into place, bit for bit.
void restore(const std::filesystem::path& checkpoint, core::model::Decoder& decoder, core::optim::Optimizer& optimizer,
             core::model::Decoder* reference_model);

}  // namespace longstraw::training
