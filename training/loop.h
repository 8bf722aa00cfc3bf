#pragma once
// The state of a run, and its steps in order.

#include "core/optim/optimizer.h"
#include "training/checkpoint.h"
#include "training/generation.h"
#include "training/journal.h"
#include "training/local_sampler.h"
#include "training/train.h"

#include <memory>
#include <optional>

namespace longstraw::training {

class Loop {
 public:
  Loop(core::model::Decoder& decoder, Data& data, const Settings& settings, const Hooks& hooks);
  Outcome run();

 private:
  // Where the run goes on from: nothing when it begins.
  std::optional<std::filesystem::path> starting_checkpoint() const;
  void resume();
  void steps();
  // After an error: a checkpoint of the last whole step, where there is none.
  void keep_what_is_whole(const std::string& problem);
  void begin_generation();
  void one_step();
  Captured captured_for(const MiniBatch& part);
  void release_captured();
  void evaluate_now();
  bool evaluation_is_due() const;
  bool save_is_due() const;
  void save();
  Metrics latest() const;

  core::model::Decoder& decoder_;
  Data& data_;
  const Settings& settings_;
  const Hooks& hooks_;
  std::unique_ptr<Policy> policy_;
  std::unique_ptr<Sampler> sampler_, eval_sampler_;
  SamplingParts sampling_;
  std::unique_ptr<RolloutSource> source_;
  std::unique_ptr<ReferenceModel> reference_model_;  // null: no KL term
  int64_t total_steps_ = 0;
  std::unique_ptr<core::optim::Optimizer> optimizer_;
  CheckpointStore store_;
  std::unique_ptr<Journal> journal_;

  TrainerState state_;
  std::optional<Generation> generation_;  // the one being trained on
  Metrics generation_figures_;            // until its first step is logged
  TrainerState before_generation_;
  bool writing_ = false;  // weights or a checkpoint: what stands in memory or on the disk may be half of it
  bool finished_ = false;
  int64_t saved_step_ = -1, evaluated_step_ = -1;
  std::filesystem::path checkpoint_;
};

}  // namespace longstraw::training
