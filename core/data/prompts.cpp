#include "core/data/prompts.h"

#include "core/base/errors.h"
#include "core/config/nearest.h"
#include "core/data/json_lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <unordered_map>

namespace longstraw::core::data {
namespace {

using nlohmann::json;

void require_messages(const json& messages, const Place& place) {
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const json& message = messages[i];
    const std::string key = fmt::format("prompt[{}]", i);
    if (!message.is_object()) place.fail(key, fmt::format("got {}, wanted a chat message", describe(message)));
    for (const char* part : {"role", "content"}) {
      if (!message.contains(part)) place.fail(key, fmt::format("has no {}, wanted {{\"role\": ..., \"content\": ...}}", part));
    }
    if (!message["role"].is_string()) place.fail(key + ".role", fmt::format("got {}, wanted a text", describe(message["role"])));
  }
}

std::vector<std::int64_t> token_ids(const json& value, const Place& place) {
  if (!value.is_array() || value.empty()) {
    place.fail("prompt_ids", fmt::format("got {}, wanted a list of at least one token id", describe(value)));
  }
  std::vector<std::int64_t> ids;
  for (const json& item : value) {
    const bool fits = item.is_number_unsigned() && item.get<std::uint64_t>() <= INT64_MAX;
    if (!fits)
      place.fail(fmt::format("prompt_ids[{}]", ids.size()), fmt::format("got {}, wanted a token id from 0", describe(item)));
    ids.push_back(item.get<std::int64_t>());
  }
  return ids;
}

std::string prompt_id(const json& id, const Place& place) {
  if (id.is_number_integer()) return id.dump();
  if (id.is_string() && !id.get_ref<const std::string&>().empty()) return id.get<std::string>();
  place.fail("prompt_id", fmt::format("got {}, wanted a text that is not empty, or an integer", describe(id)));
}

PromptRow prompt_row(json columns, const Place& place) {
  PromptRow row;
  const auto take = [&](const char* key) {
    json value = columns.contains(key) ? std::move(columns[key]) : json();
    columns.erase(key);
    return value;
  };
  const json id = take("prompt_id");
  row.prompt_id = id.is_null() ? std::to_string(place.line) : prompt_id(id, place);
  row.prompt = take("prompt");
  const json ids = take("prompt_ids");
  if (!ids.is_null()) row.prompt_ids = token_ids(ids, place);

  const bool is_text = row.prompt.is_string() && !row.prompt.get_ref<const std::string&>().empty();
  const bool is_chat = row.prompt.is_array() && !row.prompt.empty();
  if (is_chat) require_messages(row.prompt, place);
  if (!is_text && !is_chat && !(row.prompt.is_null() && row.prompt_ids)) {
    if (!row.prompt.is_null()) {
      place.fail("prompt", fmt::format("got {}, wanted a text or a list of chat messages, not empty", describe(row.prompt)));
    }
    std::string hint;
    for (const auto& [name, value] : columns.items()) {
      if (const auto near = config::nearest(name, {"prompt", "prompt_ids"}))
        hint = fmt::format("; did you mean {} by {}?", *near, name);
    }
    place.fail("prompt", "is missing, wanted a text, a list of chat messages, or prompt_ids" + hint);
  }
  // The reward function is called with these by name: f(prompts, completions, completion_ids, **columns).
  for (const char* taken : {"prompts", "completions", "completion_ids"}) {
    if (columns.contains(taken))
      place.fail(taken, "is a name that reward functions are called with; call the column something else");
  }
  row.columns = std::move(columns);
  return row;
}

}  // namespace

bool is_parquet(const std::filesystem::path& path) {
  std::string suffix = path.extension().string();
  std::transform(suffix.begin(), suffix.end(), suffix.begin(), [](unsigned char c) { return std::tolower(c); });
  return suffix == ".parquet" || suffix == ".pq";
}

std::vector<PromptRow> read_prompts(const std::filesystem::path& path) {
  if (is_parquet(path)) {
    throw FormatError(fmt::format("{}: is Parquet, wanted JSONL: `longstraw prepare` makes it of the file", path.string()));
  }
  LineReader reader(path);
  std::vector<PromptRow> rows;
  std::unordered_map<std::string, std::int64_t> line_of;
  std::string line;
  while (reader.next(line)) {
    const Place& place = reader.place();
    rows.push_back(prompt_row(parse_row(line, place, [](const std::string&) { return true; }).columns, place));
    const auto [before, is_new] = line_of.try_emplace(rows.back().prompt_id, place.line);
    if (!is_new) {
      place.fail("prompt_id", fmt::format("got {}, which line {} has already", json(rows.back().prompt_id).dump(), before->second));
    }
  }
  if (rows.empty()) throw FormatError(fmt::format("{}: is empty, wanted at least one line with a prompt", path.string()));
  return rows;
}

}  // namespace longstraw::core::data
