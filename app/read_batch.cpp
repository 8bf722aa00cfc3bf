#include "app/read_batch.h"

#include "core/base/errors.h"
#include "core/model/architecture.h"

namespace longstraw::app {

int64_t vocabulary(const RunConfig& config) {
  if (config.model.path.empty()) throw ConfigError("model.path: not given, wanted a checkpoint folder");
  return core::model::read_architecture(config.model.path).vocab;
}

core::data::Batch read_batch(const RunConfig& config) {
  if (!config.data.rollouts) throw ConfigError("data.rollouts: not given, wanted a JSONL file of responses");
  return core::data::read_rollouts(*config.data.rollouts, {.vocab_size = vocabulary(config)});
}

}  // namespace longstraw::app
