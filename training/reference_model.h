#pragma once
// The reference model of the KL term: another checkpoint, the start of this run, or (under LoRA) the frozen base.

#include "core/model/decoder.h"
#include "training/policy.h"
#include "training/settings.h"

#include <memory>

namespace longstraw::training {

class ReferenceModel {
 public:
  // Reads the checkpoint where it has to be another set of weights. FormatError for one of another vocabulary.
  ReferenceModel(const Settings& settings, const core::model::Decoder& decoder);

  core::model::TokenScores scores(const Policy& policy, const core::data::Batch& batch) const;
  // Moves towards the policy where it is synced and `steps` optimizer steps are a time for it.
  void after_step(int64_t steps);
  // Weights of its own that change: what a checkpoint has to keep; null: none.
  core::model::Decoder* changing() { return train_.sync_ref_model ? own_.get() : nullptr; }

 private:
  const core::model::Decoder& policy_decoder_;
  TrainConfig train_;
  std::unique_ptr<core::model::Decoder> own_;  // null: the policy's decoder without its adapters
};

}  // namespace longstraw::training
