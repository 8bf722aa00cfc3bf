#pragma once
// The batches of `longstraw study`: a prompt of an exact length and responses of an exact length, sampled once and kept.
//
// Prompt: the last P tokens of a prompt of data.prompts that has at least P; the seed chooses among those. Responses: G of R
// tokens each, sampled from the model behind that prompt; no token ends one early. Rewards: those of data.reward, or, without
// it, 1 and 0 in turn: after GRPO's normalisation in an even group the advantages are plus and minus the same number, near 1.

#include "app/config.h"
#include "app/progress.h"
#include "app/sample_batch.h"
#include "app/study_grid.h"

#include "core/data/rollouts.h"
#include "core/model/decoder.h"

#include <filesystem>
#include <string>
#include <vector>

namespace longstraw::app {

class StudyData {
 public:
  // Of one model. `folder` keeps the batches, one rollouts file each, so that what continues a study has the same data.
  // Encodes all prompts. `config` and the decoder must outlive this object. Throws as PromptSampler does.
  StudyData(const RunConfig& config, const core::model::Decoder& decoder, std::filesystem::path folder, std::string model_name,
            Progress& progress);

  // Read from the folder, or sampled and written there. FormatError when no prompt has enough tokens, when the file that is
  // there is of another prompt or shape, and when there is no gradient at all prompts of that length: rewards are equal, or
  // responses are.
  core::data::Batch batch(const StudyPoint& point);

 private:
  std::filesystem::path path_of(const StudyPoint& point) const;
  // The prompts that are long enough, beginning with the seed's.
  std::vector<size_t> rows_for(const StudyPoint& point) const;
  std::vector<int64_t> last_tokens(size_t row, const StudyPoint& point) const;
  core::data::Batch read(const std::filesystem::path& path, const StudyPoint& point) const;
  core::data::Batch sample(const StudyPoint& point);

  const RunConfig& config_;
  const core::model::Decoder& decoder_;
  std::filesystem::path folder_;
  std::string model_name_;
  Progress& progress_;
  PromptSampler sampler_;
  std::vector<std::vector<int64_t>> prompts_;
};

}  // namespace longstraw::app
