#include "training/generation.h"

#include <utility>

namespace longstraw::training {
namespace {

using core::data::Response;
using nlohmann::json;

template <class T>
json optional_json(const std::optional<T>& value) {
  return value ? json(*value) : json(nullptr);
}

template <class T>
std::optional<T> optional_from(const json& value) {
  if (value.is_null()) return std::nullopt;
  return value.get<T>();
}

json response_json(const Response& response) {
  json parts = json::array();
  for (const auto& part : response.reward_parts) parts.push_back(optional_json(part));
  return {{"completion_ids", response.completion_ids},
          {"reward", optional_json(response.reward)},
          {"reward_parts", std::move(parts)},
          {"advantage", optional_json(response.advantage)},
          {"old_logprobs", optional_json(response.old_logprobs)},
          {"ref_logprobs", optional_json(response.ref_logprobs)},
          {"sampling_logprobs", optional_json(response.sampling_logprobs)},
          {"completion_mask", optional_json(response.completion_mask)}};
}

Response response_from(const json& value) {
  Response response;
  response.completion_ids = value.at("completion_ids").get<std::vector<int64_t>>();
  response.reward = optional_from<double>(value.at("reward"));
  for (const json& part : value.at("reward_parts")) response.reward_parts.push_back(optional_from<double>(part));
  response.advantage = optional_from<double>(value.at("advantage"));
  response.old_logprobs = optional_from<std::vector<double>>(value.at("old_logprobs"));
  response.ref_logprobs = optional_from<std::vector<double>>(value.at("ref_logprobs"));
  response.sampling_logprobs = optional_from<std::vector<double>>(value.at("sampling_logprobs"));
  response.completion_mask = optional_from<std::vector<uint8_t>>(value.at("completion_mask"));
  return response;
}

}  // namespace

json to_json(const Generation& generation) {
  json groups = json::array();
  for (const auto& group : generation.batch) {
    json responses = json::array();
    for (const auto& response : group.responses) responses.push_back(response_json(response));
    groups.push_back({{"prompt_id", group.prompt_id}, {"prompt_ids", group.prompt_ids}, {"responses", std::move(responses)}});
  }
  return {{"groups", std::move(groups)}, {"truncated", generation.truncated}, {"steps_done", generation.steps_done}};
}

Generation generation_from_json(const json& value) {
  Generation generation;
  for (const json& group : value.at("groups")) {
    auto& own = generation.batch.emplace_back();
    own.prompt_id = group.at("prompt_id").get<std::string>();
    own.prompt_ids = group.at("prompt_ids").get<std::vector<int64_t>>();
    for (const json& response : group.at("responses")) own.responses.push_back(response_from(response));
  }
  generation.truncated = value.at("truncated").get<std::vector<std::vector<uint8_t>>>();
  generation.steps_done = value.at("steps_done").get<int64_t>();
  generation.captured.resize(generation.batch.size());
  return generation;
}

}  // namespace longstraw::training
