#pragma once
// What a run is told: the sections of the configuration that the loop reads, and who runs it.

#include "core/data/config.h"
#include "core/model/config.h"
#include "core/model/lora.h"
#include "core/objective/config.h"
#include "core/optim/config.h"
#include "core/record/config.h"
#include "longstraw/config.h"
#include "reference/config.h"
#include "training/config.h"

#include <functional>
#include <string>
#include <string_view>

namespace longstraw::training {

struct Settings {
  core::model::ModelConfig model;
  core::model::LoraConfig lora;
  core::data::DataConfig data;
  core::data::RolloutConfig rollout;
  core::objective::ObjectiveConfig objective;
  LongstrawConfig longstraw;
  reference::ReferenceConfig reference;
  core::record::RecordConfig record;
  TrainConfig train;
  core::optim::OptimConfig optim;
  std::string config_yaml;  // the whole configuration, for the record
  std::string torch_version, git_commit;
};

// How the loop speaks with whoever runs it. None may be empty.
struct Hooks {
  std::function<void(std::string_view line)> say;        // a line that stays
  std::function<void(std::string_view where)> progress;  // what is under way; cheap
  std::function<bool()> should_stop;                     // asked after each optimizer step: save and leave
};

// Settings that exclude each other, named by their keys. Throws ConfigError with all of them.
void check_settings(const Settings& settings);

}  // namespace longstraw::training
