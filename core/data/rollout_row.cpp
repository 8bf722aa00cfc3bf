#include "core/data/rollout_row.h"

#include "core/config/nearest.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace longstraw::core::data {
namespace {

using nlohmann::json;

constexpr std::array<std::string_view, 3> kRequired = {"prompt_id", "prompt_ids", "completion_ids"};
constexpr std::array<std::string_view, 7> kOptional = {"reward",       "reward_parts",      "advantage",      "old_logprobs",
                                                       "ref_logprobs", "sampling_logprobs", "completion_mask"};

// What other trainers call our columns. A file that has them and lacks ours would lose them silently.
struct ForeignName {
  std::string_view theirs;
  std::string_view ours;
};
constexpr std::array kForeign = {
    ForeignName{"old_per_token_logps", "old_logprobs"},
    ForeignName{"old_logps", "old_logprobs"},
    ForeignName{"ref_per_token_logps", "ref_logprobs"},
    ForeignName{"ref_logps", "ref_logprobs"},
    ForeignName{"sampling_per_token_logps", "sampling_logprobs"},
    ForeignName{"rollout_log_probs", "sampling_logprobs"},
    ForeignName{"rollout_logprobs", "sampling_logprobs"},
    ForeignName{"response_ids", "completion_ids"},
    ForeignName{"response_mask", "completion_mask"},
    ForeignName{"loss_mask", "completion_mask"},
};

template <std::size_t N>
bool is_one_of(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_ours(const std::string& name) { return is_one_of(kRequired, name) || is_one_of(kOptional, name); }

// A column that is not ours is ignored, unless it looks like one of ours that the line lacks.
void refuse_misspelt(const ParsedRow& row, const Place& place) {
  std::vector<std::string> lacking;
  const auto note_if_lacking = [&](std::string_view name) {
    if (!row.columns.contains(name)) lacking.emplace_back(name);
  };
  std::for_each(kRequired.begin(), kRequired.end(), note_if_lacking);
  std::for_each(kOptional.begin(), kOptional.end(), note_if_lacking);
  for (const std::string& name : row.other_columns) {
    const auto foreign = std::find_if(kForeign.begin(), kForeign.end(), [&](const auto& f) { return f.theirs == name; });
    if (foreign != kForeign.end() && std::find(lacking.begin(), lacking.end(), foreign->ours) != lacking.end()) {
      place.fail(name, fmt::format("unknown column; here it is called {}", foreign->ours));
    }
    // Stricter than for a configuration: completion_text beside completion_ids is a column of the user's own.
    const auto near = config::nearest(name, lacking);
    const std::size_t allowed = name.size() < 8 ? 1 : 2;
    if (near && config::edit_distance(name, *near) <= allowed) {
      place.fail(name, fmt::format("unknown column; did you mean {}?", *near));
    }
  }
}

class RowReader {
 public:
  RowReader(const json& columns, const Place& place, const RolloutLimits& limits)
      : columns_(columns), place_(place), limits_(limits) {}

  std::string prompt_id() const {
    const json& id = required("prompt_id");
    if (id.is_string() && !id.get_ref<const std::string&>().empty()) return id.get<std::string>();
    if (id.is_number_integer()) return id.dump();
    place_.fail("prompt_id", fmt::format("got {}, wanted a text that is not empty, or an integer", describe(id)));
  }

  std::vector<std::int64_t> prompt_ids() const { return token_ids(required("prompt_ids"), "prompt_ids"); }

  std::vector<Response> responses() const {
    const json& ids = required("completion_ids");
    const bool is_group = ids.is_array() && !ids.empty() && ids[0].is_array();
    if (!is_group) {
      return {response(ids, "completion_ids",
                       [&](std::string_view column) { return std::pair(column_or_null(column), std::string(column)); })};
    }
    std::vector<Response> all;
    for (std::size_t member = 0; member < ids.size(); ++member) {
      const auto pick = [&](std::string_view column) {
        return std::pair(member_of(column, member, ids.size()), fmt::format("{}[{}]", column, member));
      };
      all.push_back(response(ids[member], fmt::format("completion_ids[{}]", member), pick));
    }
    return all;
  }

 private:
  static const json& null() {
    static const json nothing;
    return nothing;
  }

  const json& required(const char* key) const {
    if (!columns_.contains(key)) place_.fail(key, "is missing");
    return columns_[key];
  }

  const json& column_or_null(std::string_view key) const {
    const auto found = columns_.find(key);
    return found == columns_.end() ? null() : *found;
  }

  const json& member_of(std::string_view key, std::size_t member, std::size_t members) const {
    const json& column = column_or_null(key);
    if (column.is_null()) return column;
    if (!column.is_array() || column.size() != members) {
      place_.fail(key, fmt::format("got {}, wanted a list of {}: one for each of completion_ids", describe(column), members));
    }
    return column[member];
  }

  // `pick` gives, for an optional column, this response's value and what messages call it.
  template <class Pick>
  Response response(const json& ids, const std::string& key, Pick pick) const {
    Response response;
    response.completion_ids = token_ids(ids, key);
    const std::size_t tokens = response.completion_ids.size();
    const auto number_at = [&](std::string_view column) {
      const auto& [value, name] = pick(column);
      return number(value, name);
    };
    const auto logprobs_at = [&](std::string_view column) {
      const auto& [value, name] = pick(column);
      return logprobs(value, name, tokens);
    };
    response.reward = number_at("reward");
    const auto& [parts_value, parts_name] = pick("reward_parts");
    response.reward_parts = reward_parts(parts_value, parts_name);
    response.advantage = number_at("advantage");
    response.old_logprobs = logprobs_at("old_logprobs");
    response.ref_logprobs = logprobs_at("ref_logprobs");
    response.sampling_logprobs = logprobs_at("sampling_logprobs");
    const auto& [mask_value, mask_name] = pick("completion_mask");
    response.completion_mask = mask(mask_value, mask_name, tokens);
    return response;
  }

  std::vector<std::int64_t> token_ids(const json& value, const std::string& key) const {
    if (!value.is_array()) place_.fail(key, fmt::format("got {}, wanted a list of token ids", describe(value)));
    if (value.empty()) place_.fail(key, "is empty, wanted at least one token");
    std::vector<std::int64_t> ids;
    ids.reserve(value.size());
    for (const json& item : value) {
      // get<int64>() of a larger unsigned would wrap to a negative number.
      const bool fits = item.is_number_integer() && !(item.is_number_unsigned() && item.get<std::uint64_t>() > INT64_MAX);
      const std::int64_t id = fits ? item.get<std::int64_t>() : -1;
      if (id < 0 || (limits_.vocab_size && id >= *limits_.vocab_size)) {
        const std::string below = limits_.vocab_size ? fmt::format(", below the vocabulary's {}", *limits_.vocab_size) : "";
        place_.fail(fmt::format("{}[{}]", key, ids.size()),
                    fmt::format("got {}, wanted a token id from 0{}", describe(item), below));
      }
      ids.push_back(id);
    }
    return ids;
  }

  std::optional<double> number(const json& value, const std::string& key) const {
    if (value.is_null()) return std::nullopt;
    if (value.is_boolean()) return value.get<bool>() ? 1.0 : 0.0;  // a reward function's True
    if (!value.is_number()) place_.fail(key, fmt::format("got {}, wanted a finite number or null", describe(value)));
    return value.get<double>();
  }

  std::vector<std::optional<double>> reward_parts(const json& value, const std::string& key) const {
    if (value.is_null()) return {};
    if (!value.is_array() || value.empty()) {
      place_.fail(key, fmt::format("got {}, wanted a list of numbers or nulls, one for each reward function", describe(value)));
    }
    std::vector<std::optional<double>> parts;
    for (const json& item : value) parts.push_back(number(item, fmt::format("{}[{}]", key, parts.size())));
    return parts;
  }

  void require_length(const json& value, const std::string& key, std::size_t tokens, std::string_view what) const {
    if (!value.is_array() || value.size() != tokens) {
      place_.fail(key, fmt::format("got {}, wanted {} {}: one for each token of the completion", describe(value), tokens, what));
    }
  }

  std::optional<std::vector<double>> logprobs(const json& value, const std::string& key, std::size_t tokens) const {
    if (value.is_null()) return std::nullopt;
    require_length(value, key, tokens, "log-probs");
    std::vector<double> all;
    all.reserve(tokens);
    for (const json& item : value) {
      if (!item.is_number()) {
        place_.fail(fmt::format("{}[{}]", key, all.size()), fmt::format("got {}, wanted a finite number", describe(item)));
      }
      all.push_back(item.get<double>());
    }
    return all;
  }

  std::optional<std::vector<std::uint8_t>> mask(const json& value, const std::string& key, std::size_t tokens) const {
    if (value.is_null()) return std::nullopt;
    require_length(value, key, tokens, "mask values");
    std::vector<std::uint8_t> all;
    all.reserve(tokens);
    for (const json& item : value) {
      if (item != 0 && item != 1 && !item.is_boolean()) {
        place_.fail(fmt::format("{}[{}]", key, all.size()), fmt::format("got {}, wanted 0 or 1", describe(item)));
      }
      all.push_back(item == 1 || item == true ? 1 : 0);
    }
    return all;
  }

  const json& columns_;
  const Place& place_;
  const RolloutLimits& limits_;
};

}  // namespace

RolloutRow parse_rollout_row(const std::string& line, const Place& place, const RolloutLimits& limits) {
  ParsedRow parsed = parse_row(line, place, is_ours);
  refuse_misspelt(parsed, place);
  const RowReader reader(parsed.columns, place, limits);
  RolloutRow row;
  row.prompt_id = reader.prompt_id();
  row.prompt_ids = reader.prompt_ids();
  row.responses = reader.responses();
  for (const std::string_view name : kOptional) {
    if (parsed.columns.contains(name)) row.optional_columns.emplace(name);
  }
  row.other_columns = std::move(parsed.other_columns);
  return row;
}

}  // namespace longstraw::core::data
