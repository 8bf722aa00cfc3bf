#include <nlohmann/json.hpp>

#include "core/record/reader.h"

namespace longstraw::core::record {
namespace {

nlohmann::json describe_header(const RecordHeader& h) {
  return {{"arm", h.arm},
          {"model_sha256", h.model_sha256},
          {"data_sha256", h.data_sha256},
          {"dtype", h.dtype},
          {"device", h.device},
          {"world_size", h.world_size},
          {"seed", h.seed},
          {"config", h.config_yaml},
          {"extra", h.extra},
          {"torch_version", h.torch_version},
          {"git_commit", h.git_commit},
          {"deterministic", h.deterministic}};
}

nlohmann::json describe_step(const RecordReader& record, std::int64_t step) {
  nlohmann::json gradients = nlohmann::json::array();
  std::int64_t elements = 0;
  for (const auto& info : record.gradients(step)) {
    gradients.push_back({{"name", info.name}, {"shape", info.shape}, {"dtype", info.dtype}});
    elements += info.elements;
  }
  std::int64_t tokens = 0;
  const auto responses = record.responses(step);
  for (const auto& response : responses) tokens += static_cast<std::int64_t>(response.tokens.size());
  return {{"step", step},
          {"gradients", gradients},
          {"gradient_elements", elements},
          {"sketches", record.sketch_names(step).size()},
          {"responses", responses.size()},
          {"response_tokens", tokens},
          {"objective", record.objective(step)},
          {"memory", record.memory(step)},
          {"timing", record.timing(step)}};
}

}  // namespace

nlohmann::json describe(const std::string& path) {
  const RecordReader record(path);
  nlohmann::json result{{"format", kFormat},
                        {"format_version", kFormatVersion},
                        {"path", path},
                        {"closed", record.closed()},
                        {"header", describe_header(record.header())},
                        {"steps", nlohmann::json::array()},
                        {"reward_rows", record.rewards().size()},
                        {"metrics_rows", record.metrics().size()}};
  for (const std::int64_t step : record.steps()) result["steps"].push_back(describe_step(record, step));
  return result;
}

}  // namespace longstraw::core::record
