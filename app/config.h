#pragma once
// The whole configuration: a section a component. Load it with
//   auto config = core::config::load<app::RunConfig>({.file = "run.yaml", .overrides = {"longstraw.tail_tokens=64"}});

#include "compare/config.h"
#include "core/config/faults.h"
#include "core/config/fields.h"
#include "core/data/config.h"
#include "core/model/config.h"
#include "core/model/lora.h"
#include "core/objective/config.h"
#include "core/optim/config.h"
#include "core/record/config.h"
#include "longstraw/config.h"
#include "reference/config.h"
#include "training/config.h"

namespace longstraw::app {

struct RunConfig {
  core::model::ModelConfig model;
  core::model::LoraConfig lora;
  core::data::DataConfig data;
  core::data::RolloutConfig rollout;
  core::objective::ObjectiveConfig objective;
  LongstrawConfig longstraw;
  reference::ReferenceConfig reference;
  training::TrainConfig train;
  core::optim::OptimConfig optim;
  core::record::RecordConfig record;
  compare::CompareConfig compare;

  static constexpr auto fields() {
    using namespace core::config;
    using C = RunConfig;
    return std::tuple{
        field("model", &C::model, "the checkpoint"),
        field("lora", &C::lora, "low-rank adapters that are trained in place of the weights"),
        field("data", &C::data, "the batch: rollouts, or prompts and a reward function"),
        field("rollout", &C::rollout, "how responses are sampled"),
        field("objective", &C::objective, "the loss, named as in TRL's GRPOConfig"),
        field("longstraw", &C::longstraw, "the capture-and-replay trainer"),
        field("reference", &C::reference, "the full-graph trainer"),
        field("train", &C::train, "the training loop, named as in TRL's GRPOConfig"),
        field("optim", &C::optim, "the optimizer, named as in transformers' TrainingArguments"),
        field("record", &C::record, "what is written"),
        field("compare", &C::compare, "the comparator"),
    };
  }

  // Rules across fields that hold whatever the verb is. What a verb needs besides (a model, a batch) it asks for itself.
  void check(core::config::Faults& faults) const {
    if (data.rollouts && data.prompts && !faults.at({"data.rollouts", "data.prompts"})) {
      faults.add("data.prompts", "data.rollouts is given too, wanted one of them (set the other to null)");
    }
    if (data.prompts && (!data.reward || data.reward->empty()) && !faults.at({"data.prompts", "data.reward"})) {
      faults.add("data.reward", "data.prompts needs a reward function, FILE.py:FUNCTION or command:PROGRAM ARGUMENTS");
    }
    if (lora.lora_dropout != 0.0 && !faults.at({"lora.lora_dropout"})) {
      faults.add("lora.lora_dropout", "wanted 0: a replay would need the same random mask as its capture");
    }
    if (lora.wanted() && lora.target_modules.empty() && !faults.at({"lora.target_modules"})) {
      faults.add("lora.target_modules", "empty, wanted names of linear layers, or all-linear");
    }
  }
  bool operator==(const RunConfig&) const = default;
};

}  // namespace longstraw::app
