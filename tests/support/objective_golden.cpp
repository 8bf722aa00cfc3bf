#include "tests/support/objective_golden.h"

#include "core/config/enums.h"

#include <fstream>
#include <optional>

namespace longstraw::test {
namespace {

std::optional<double> optional_number(const nlohmann::json& value) {
  return value.is_null() ? std::nullopt : std::optional(value.get<double>());
}

template <class Enum>
Enum named(const nlohmann::json& value) {
  return core::config::value_named<Enum>(value.get<std::string>()).value();
}

}  // namespace

const nlohmann::json& objective_golden() {
  static const auto kGolden = nlohmann::json::parse(std::ifstream("fixtures/objective/trl.json"));
  return kGolden;
}

core::objective::ObjectiveConfig objective_config(const nlohmann::json& j) {
  using namespace core::objective;
  ObjectiveConfig config;
  config.loss_type = named<LossType>(j.at("loss_type"));
  config.scale_rewards = named<ScaleRewards>(j.at("scale_rewards"));
  config.kl = named<Kl>(j.at("kl"));
  config.beta = j.at("beta");
  config.epsilon = j.at("epsilon");
  config.epsilon_high = optional_number(j.at("epsilon_high"));
  config.delta = optional_number(j.at("delta"));
  config.advantage_epsilon = j.at("advantage_epsilon");
  return config;
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
    if (!c.at("rewards").is_null()) response.reward = optional_number(c.at("rewards")[i]);
    if (!c.at("old_logprobs").is_null()) response.old_logprobs = c["old_logprobs"][i].get<std::vector<double>>();
    if (!c.at("ref_logprobs").is_null()) response.ref_logprobs = c["ref_logprobs"][i].get<std::vector<double>>();
    batch.back().responses.push_back(std::move(response));
  }
  return batch;
}

}  // namespace longstraw::test
