#include "app/write_record.h"

#include "app/build_info.h"
#include "app/interrupt.h"

#include "core/config/load.h"
#include "core/data/rewards.h"
#include "core/record/writer.h"
#include "training/record_step.h"

#include <torch/version.h>

#include <string>
#include <vector>

namespace longstraw::app {
namespace {

core::record::RecordHeader header_of(const RecordedStep& step) {
  return {.arm = step.arm,
          .config_yaml = core::config::dump(step.config),
          .model_sha256 = step.decoder.sha256(),
          .data_sha256 = core::data::data_sha256(step.batch),
          .dtype = std::string(core::config::name_of(step.config.model.dtype)),
          .device = step.decoder.device().is_cpu() ? "cpu" : "cuda",
          .world_size = 1,
          .seed = int64_t(step.config.rollout.seed),
          .torch_version = TORCH_VERSION,
          .git_commit = kGitCommit,
          .deterministic = true,
          .extra = {}};
}

}  // namespace

void write_record(const std::filesystem::path& path, const RecordedStep& step) {
  const WritingResults signals_wait;
  const auto& rewards = step.config.data.reward;
  const auto names = rewards ? core::data::reward_names(*rewards) : std::vector<std::string>();
  core::record::RecordWriter writer(path.string(), header_of(step), {.replace = true});
  core::record::StepWriter out = writer.begin_step(0);
  training::write_step(out, {.decoder = step.decoder, .batch = step.batch, .result = step.result});
  writer.append_rewards(training::reward_rows(step.batch, 0, "train", names));
  out.commit();
  writer.close();
}

}  // namespace longstraw::app
