#include "core/data/rollouts.h"

#include "core/base/errors.h"
#include "core/data/rollout_row.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <iterator>
#include <unordered_map>

namespace longstraw::core::data {
namespace {

// Where each group of the batch began, for messages that concern the group as a whole.
struct GroupOrigin {
  std::size_t index = 0;
  Place place;
};

void require_same_prompt(const PromptGroup& group, const GroupOrigin& origin, const RolloutRow& row, const Place& place) {
  if (group.prompt_ids == row.prompt_ids) return;
  const auto [a, b] = std::mismatch(group.prompt_ids.begin(), group.prompt_ids.end(), row.prompt_ids.begin(), row.prompt_ids.end());
  const auto token = [](auto at, auto end) { return at == end ? std::string("the end") : std::to_string(*at); };
  place.fail(fmt::format("prompt_ids[{}]", b - row.prompt_ids.begin()),
             fmt::format("got {}, but {} in line {} has the same prompt_id {}", token(b, row.prompt_ids.end()),
                         token(a, group.prompt_ids.end()), origin.place.line, nlohmann::json(row.prompt_id).dump()));
}

// A column that some members have and others lack is more likely a fault in the file than a wish.
template <class Member>
void require_all_or_none(const PromptGroup& group, const Place& place, Member member, const char* column) {
  const auto& all = group.responses;
  const auto has = std::count_if(all.begin(), all.end(), [&](const Response& r) { return (r.*member).has_value(); });
  if (has != 0 && has != std::ssize(all)) {
    place.fail(column, fmt::format("{} of the {} responses to prompt_id {} have it, wanted all or none", has, all.size(),
                                   nlohmann::json(group.prompt_id).dump()));
  }
}

void check_group(const PromptGroup& group, const Place& place) {
  require_all_or_none(group, place, &Response::advantage, "advantage");
  require_all_or_none(group, place, &Response::old_logprobs, "old_logprobs");
  require_all_or_none(group, place, &Response::ref_logprobs, "ref_logprobs");
  require_all_or_none(group, place, &Response::sampling_logprobs, "sampling_logprobs");
  const auto& all = group.responses;
  const auto parts = all.front().reward_parts.size();
  for (const Response& response : all) {
    if (response.reward_parts.size() != parts) {
      place.fail("reward_parts",
                 fmt::format("responses to prompt_id {} have {} and {} of them, wanted one for each reward function",
                             nlohmann::json(group.prompt_id).dump(), parts, response.reward_parts.size()));
    }
  }
  const std::string id = nlohmann::json(group.prompt_id).dump();
  if (std::none_of(all.begin(), all.end(), [](const Response& r) { return r.reward || r.advantage; })) {
    place.fail("reward", fmt::format("no response to prompt_id {} has a reward or an advantage", id));
  }
  const auto is_masked = [](const Response& r) {
    return r.completion_mask && std::count(r.completion_mask->begin(), r.completion_mask->end(), 1) == 0;
  };
  if (std::all_of(all.begin(), all.end(), is_masked)) {
    place.fail("completion_mask", fmt::format("every token of every response to prompt_id {} is masked", id));
  }
}

}  // namespace

Batch read_rollouts(const std::filesystem::path& path, const RolloutLimits& limits) {
  LineReader reader(path);
  Batch batch;
  std::vector<GroupOrigin> origins;
  std::unordered_map<std::string, std::size_t> index_of;
  std::string line;
  while (reader.next(line)) {
    RolloutRow row = parse_rollout_row(line, reader.place(), limits);
    const auto [found, is_new] = index_of.try_emplace(row.prompt_id, batch.size());
    if (is_new) {
      batch.push_back({row.prompt_id, std::move(row.prompt_ids), {}});
      origins.push_back({found->second, reader.place()});
    } else {
      require_same_prompt(batch[found->second], origins[found->second], row, reader.place());
    }
    std::move(row.responses.begin(), row.responses.end(), std::back_inserter(batch[found->second].responses));
  }
  if (batch.empty()) throw FormatError(fmt::format("{}: is empty, wanted at least one line with a rollout", path.string()));
  for (const GroupOrigin& origin : origins) check_group(batch[origin.index], origin.place);
  return batch;
}

}  // namespace longstraw::core::data
