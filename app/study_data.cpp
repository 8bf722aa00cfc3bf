#include "app/study_data.h"

#include "app/arms.h"
#include "app/interrupt.h"

#include "core/base/errors.h"
#include "reference/objective.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace longstraw::app {
namespace {

namespace fs = std::filesystem;
using core::data::Batch;

// Equal responses with advantages of sum zero cancel: a model that is sure of itself, sampled at a low temperature. What
// would be measured is rounding.
bool responses_cancel(const Batch& batch, const core::objective::ObjectiveConfig& objective) {
  std::map<std::vector<int64_t>, double> weights;
  const std::vector<double> advantages = reference::advantages(batch, objective).front();
  double largest = 0;
  for (size_t m = 0; m < advantages.size(); ++m) {
    weights[batch.front().responses[m].completion_ids] += advantages[m];
    largest = std::max(largest, std::abs(advantages[m]));
  }
  const auto cancels = [&](const auto& entry) { return std::abs(entry.second) <= 1e-9 * largest; };
  return std::all_of(weights.begin(), weights.end(), cancels);
}

void alternate_rewards(core::data::PromptGroup& group) {
  for (size_t m = 0; m < group.responses.size(); ++m) group.responses[m].reward = m % 2 == 0 ? 1.0 : 0.0;
}

}  // namespace

StudyData::StudyData(const RunConfig& config, const core::model::Decoder& decoder, fs::path folder, std::string model_name,
                     Progress& progress)
    : config_(config),
      decoder_(decoder),
      folder_(std::move(folder)),
      model_name_(std::move(model_name)),
      progress_(progress),
      sampler_(config, progress) {
  progress.begin(fmt::format("encoding {} prompts", sampler_.prompts()));
  for (size_t row = 0; row < sampler_.prompts(); ++row) prompts_.push_back(sampler_.encode(decoder, row));
  progress.done();
}

fs::path StudyData::path_of(const StudyPoint& p) const {
  return folder_ / fmt::format("{}-{}-P{}-G{}-R{}-seed{}.jsonl", model_name_, core::config::name_of(config_.model.dtype),
                               p.prompt_tokens, p.group_size, p.response_tokens, p.seed);
}

std::vector<size_t> StudyData::rows_for(const StudyPoint& point) const {
  std::vector<size_t> rows;
  size_t longest = 0;
  for (size_t row = 0; row < prompts_.size(); ++row) {
    longest = std::max(longest, prompts_[row].size());
    if (std::ssize(prompts_[row]) >= point.prompt_tokens) rows.push_back(row);
  }
  if (rows.empty()) {
    throw FormatError(fmt::format("{}: the longest of its {} prompts has {} tokens under {}, wanted {} (--prompt-tokens)",
                                  *config_.data.prompts, prompts_.size(), longest, config_.model.path, point.prompt_tokens));
  }
  std::rotate(rows.begin(), rows.begin() + std::ptrdiff_t(size_t(point.seed) % rows.size()), rows.end());
  return rows;
}

std::vector<int64_t> StudyData::last_tokens(size_t row, const StudyPoint& point) const {
  const auto& prompt = prompts_.at(row);
  return {prompt.end() - point.prompt_tokens, prompt.end()};
}

Batch StudyData::read(const fs::path& path, const StudyPoint& point) const {
  Batch batch = core::data::read_rollouts(path, {.vocab_size = decoder_.architecture().vocab});
  const auto require = [&](bool holds, const std::string& fault) {
    if (holds) return;
    throw FormatError(
        fmt::format("{}: {}; it was kept for another study: remove it, or write to another --out", path.string(), fault));
  };
  require(batch.size() == 1, fmt::format("{} prompts, wanted 1", batch.size()));
  const auto& group = batch.front();
  require(std::ssize(group.responses) == point.group_size,
          fmt::format("{} responses, wanted {}", group.responses.size(), point.group_size));
  for (const auto& response : group.responses) {
    require(std::ssize(response.completion_ids) == point.response_tokens,
            fmt::format("a response of {} tokens, wanted {}", response.completion_ids.size(), point.response_tokens));
  }
  const auto rows = rows_for(point);
  const auto same = std::find_if(rows.begin(), rows.end(), [&](size_t row) { return sampler_.prompt_id(row) == group.prompt_id; });
  require(same != rows.end() && group.prompt_ids == last_tokens(*same, point),
          fmt::format("its prompt {} is not the last {} tokens of that prompt in {}", group.prompt_id, point.prompt_tokens,
                      *config_.data.prompts));
  return batch;
}

Batch StudyData::sample(const StudyPoint& point) {
  core::data::RolloutConfig rollout = config_.rollout;
  rollout.num_generations = point.group_size;
  rollout.max_completion_length = point.response_tokens;
  rollout.seed = uint64_t(point.seed);
  rollout.stop_token_ids = std::vector<int64_t>();
  for (const size_t row : rows_for(point)) {
    Batch batch{sampler_.sample(decoder_, row, last_tokens(row, point), rollout).group};
    if (!config_.data.reward) alternate_rewards(batch.front());
    const bool equal_rewards = has_no_gradient(batch, config_.objective);
    if (!equal_rewards && !responses_cancel(batch, config_.objective)) return batch;
    progress_.say(fmt::format("  prompt {}: all {} are equal, so there is no gradient; taking the next prompt",
                              sampler_.prompt_id(row), equal_rewards ? "rewards" : "responses"));
  }
  throw FormatError(
      fmt::format("{}: no prompt of {} tokens got different responses with different rewards, so there is no gradient to "
                  "measure; wanted other prompts, a higher rollout.temperature or more responses a group",
                  *config_.data.prompts, point.prompt_tokens));
}

Batch StudyData::batch(const StudyPoint& point) {
  const fs::path path = path_of(point);
  if (fs::exists(path)) return read(path, point);
  Batch batch = sample(point);
  const WritingResults signals_wait;
  core::data::write_rollouts(path, batch, core::data::RolloutLayout::kGroups);
  return batch;
}

}  // namespace longstraw::app
