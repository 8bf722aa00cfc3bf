#include "tests/support/objective_golden.h"

#include "core/config/load.h"

#include <filesystem>
#include <fstream>
#include <optional>
#include <set>

namespace longstraw::test {
namespace {

using Row = std::vector<double>;

std::optional<double> optional_number(const nlohmann::json& value) {
  return value.is_null() ? std::nullopt : std::optional(value.get<double>());
}

std::optional<Row> optional_row(const nlohmann::json& rows, size_t i) {
  return rows.is_null() ? std::nullopt : std::optional(rows[i].get<Row>());
}

}  // namespace

const nlohmann::json& objective_golden() {
  static const auto kGolden = nlohmann::json::parse(std::ifstream("fixtures/objective/trl.json"));
  return kGolden;
}

const std::vector<nlohmann::json>& objective_cases() {
  static const auto kCases = [] {
    std::set<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator("fixtures/objective")) files.insert(entry.path());
    std::vector<nlohmann::json> cases;
    for (const auto& file : files) {
      auto golden = nlohmann::json::parse(std::ifstream(file));  // lives through the loop, as a temporary would not
      for (auto& golden_case : golden.at("cases")) cases.push_back(std::move(golden_case));
    }
    return cases;
  }();
  return kCases;
}

core::objective::ObjectiveConfig objective_config(const nlohmann::json& golden_objective) {
  // JSON is YAML: read as a user's configuration is.
  return core::config::load_text<core::objective::ObjectiveConfig>(golden_objective.dump(), "objective of a golden case");
}

core::data::Batch objective_batch(const nlohmann::json& c) {
  const auto mask = c.at("mask").get<std::vector<std::vector<uint8_t>>>();
  const size_t group_size = c.at("group_size");
  core::data::Batch batch;
  for (size_t i = 0; i < mask.size(); ++i) {
    if (i % group_size == 0) batch.push_back({.prompt_id = "p" + std::to_string(batch.size()), .prompt_ids = {0}, .responses = {}});
    core::data::Response response;
    response.completion_ids.assign(mask[i].size(), 0);
    response.completion_mask = mask[i];
    if (!c.at("rewards").is_null()) response.reward = optional_number(c["rewards"][i]);
    if (!c.at("reward_parts").is_null()) {
      for (const auto& part : c["reward_parts"][i]) response.reward_parts.push_back(optional_number(part));
    }
    response.old_logprobs = optional_row(c.at("old_logprobs"), i);
    response.ref_logprobs = optional_row(c.at("ref_logprobs"), i);
    response.sampling_logprobs = optional_row(c.at("sampling_logprobs"), i);
    batch.back().responses.push_back(std::move(response));
  }
  return batch;
}

core::model::TokenScores objective_scores(const nlohmann::json& c) {
  const auto logprobs = c.at("logprobs").get<std::vector<Row>>();
  const size_t group_size = c.at("group_size");
  core::model::TokenScores scores;
  for (size_t i = 0; i < logprobs.size(); ++i) {
    if (i % group_size == 0) {
      scores.logprobs.emplace_back();
      scores.entropies.emplace_back();
    }
    scores.logprobs.back().push_back(logprobs[i]);
    scores.entropies.back().push_back(optional_row(c.at("entropies"), i).value_or(Row(logprobs[i].size(), 0.0)));
  }
  return scores;
}

}  // namespace longstraw::test
