#include "core/data/describe.h"

#include "core/data/prompts.h"
#include "core/data/rollout_row.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <unordered_map>

namespace longstraw::core::data {
namespace {

using nlohmann::json;

struct Range {
  std::int64_t least = INT64_MAX;
  std::int64_t most = 0;
  std::int64_t total = 0;

  void add(std::int64_t value) {
    least = std::min(least, value);
    most = std::max(most, value);
    total += value;
  }
  json to_json() const { return {{"min", least}, {"max", most}, {"total", total}}; }
};

// Mean and spread by Welford's updates: a sum of squares would cancel where rewards are large and alike.
struct Moments {
  std::int64_t count = 0;
  double mean = 0.0;
  double squares = 0.0;  // sum of squared distances from the mean
  double least = INFINITY;
  double most = -INFINITY;

  void add(double value) {
    ++count;
    const double distance = value - mean;
    mean += distance / static_cast<double>(count);
    squares += distance * (value - mean);
    least = std::min(least, value);
    most = std::max(most, value);
  }
  json to_json() const {
    if (count == 0) return nullptr;
    const json std = count < 2 ? json(nullptr) : json(std::sqrt(squares / static_cast<double>(count - 1)));
    return {{"count", count}, {"mean", mean}, {"std", std}, {"min", least}, {"max", most}};
  }
};

struct Group {
  std::int64_t size = 0;
  Moments rewards;
};

struct Summary {
  std::int64_t lines = 0;
  std::unordered_map<std::string, Group> groups;
  Range prompt_tokens, response_tokens;
  std::int64_t largest_id = 0;
  std::map<std::string, std::int64_t> columns;
  std::set<std::string> other_columns;
  Moments rewards;

  void add(const RolloutRow& row) {
    ++lines;
    Group& group = groups[row.prompt_id];
    if (group.size == 0) {
      prompt_tokens.add(std::ssize(row.prompt_ids));
      largest_id = std::max(largest_id, *std::max_element(row.prompt_ids.begin(), row.prompt_ids.end()));
    }
    for (const Response& response : row.responses) add(response, group);
    other_columns.insert(row.other_columns.begin(), row.other_columns.end());
  }

 private:
  void add(const Response& response, Group& group) {
    ++group.size;
    response_tokens.add(std::ssize(response.completion_ids));
    largest_id = std::max(largest_id, *std::max_element(response.completion_ids.begin(), response.completion_ids.end()));
    if (response.reward) {
      rewards.add(*response.reward);
      group.rewards.add(*response.reward);
    }
    const auto count = [&](const char* name, bool has) {
      if (has) ++columns[name];
    };
    count("reward", response.reward.has_value());
    count("reward_parts", !response.reward_parts.empty());
    count("advantage", response.advantage.has_value());
    count("old_logprobs", response.old_logprobs.has_value());
    count("ref_logprobs", response.ref_logprobs.has_value());
    count("sampling_logprobs", response.sampling_logprobs.has_value());
    count("completion_mask", response.completion_mask.has_value());
  }
};

}  // namespace

json describe_rollouts(const std::filesystem::path& path) {
  LineReader reader(path);
  Summary summary;
  std::string line;
  while (reader.next(line)) summary.add(parse_rollout_row(line, reader.place(), {}));
  if (summary.lines == 0) Place{path.string(), 0}.fail("", "is empty, wanted at least one line with a rollout");
  Range sizes;
  std::int64_t equal = 0;
  for (const auto& [id, group] : summary.groups) {
    sizes.add(group.size);
    equal += group.rewards.count > 0 && group.rewards.least == group.rewards.most;
  }
  return {{"format", "longstraw-rollouts"},
          {"file", path.string()},
          {"lines", summary.lines},
          {"prompts", summary.groups.size()},
          {"responses", sizes.total},
          {"group_size", {{"min", sizes.least}, {"max", sizes.most}}},
          {"prompt_tokens", summary.prompt_tokens.to_json()},
          {"response_tokens", summary.response_tokens.to_json()},
          {"largest_token_id", summary.largest_id},
          {"columns", summary.columns},
          {"other_columns", summary.other_columns},
          {"reward", summary.rewards.to_json()},
          {"groups_of_equal_rewards", equal}};
}

json describe_prompts(const std::filesystem::path& path) {
  std::map<std::string, std::int64_t> kinds = {{"text", 0}, {"chat", 0}, {"token_ids", 0}};
  std::set<std::string> columns;
  const std::vector<PromptRow> rows = read_prompts(path);
  for (const PromptRow& row : rows) {
    ++kinds[row.prompt_ids ? "token_ids" : row.prompt.is_string() ? "text" : "chat"];
    for (const auto& [name, value] : row.columns.items()) columns.insert(name);
  }
  return {
      {"format", "longstraw-prompts"}, {"file", path.string()}, {"prompts", rows.size()}, {"kinds", kinds}, {"columns", columns}};
}

bool is_rollouts_file(const std::filesystem::path& path) {
  LineReader reader(path);
  std::string line;
  if (!reader.next(line)) return false;
  return parse_row(line, reader.place(), [](const std::string& name) { return name == "completion_ids"; })
      .columns.contains("completion_ids");
}

}  // namespace longstraw::core::data
