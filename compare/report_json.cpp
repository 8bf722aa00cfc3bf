#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "compare/names.h"
#include "compare/report.h"

namespace longstraw::compare {

using nlohmann::json;

json json_number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

namespace {

json known(double value, const PairStatistics& s) { return s.estimated ? json(nullptr) : json_number(value); }

json quantiles_json(const PairStatistics& s) {
  json result;
  for (const double q : {0.5, 0.9, 0.99, 1.0}) result[fmt::format("{}", q)] = known(s.error_quantile(q), s);
  return result;
}

json facts_json(const RecordFacts& facts) {
  const auto& h = facts.header;
  return {{"path", facts.path},         {"arm", h.arm},          {"dtype", h.dtype}, {"device", h.device},
          {"world_size", h.world_size}, {"closed", facts.closed}};
}

json parameters_json(const StepMeasure& measure) {
  json result = json::array();
  for (const auto& parameter : measure.parameters) {
    json entry = statistics_json(parameter.statistics);
    entry["name"] = parameter.name;
    entry["shape"] = parameter.shape;
    result.push_back(entry);
  }
  return result;
}

json shapes_json(const StepMeasure& measure) {
  json result = json::array();
  for (const auto& shape : measure.shapes) {
    result.push_back({{"name", shape.name}, {"reference", shape.reference}, {"candidate", shape.candidate}});
  }
  return result;
}

json step_json(const StepReport& step) {
  return {{"step", step.measure.step},
          {"verdict", step.judgement.pass() ? "pass" : "fail"},
          {"gradient", gradient_json(step)},
          {"update_cosine", known(step.measure.whole.update_cosine(), step.measure.whole)},
          {"checks", checks_json(step.judgement)},
          {"findings", findings_json(step.findings)},
          {"by_layer", breakdown_json(step.measure.by_layer)},
          {"by_kind", breakdown_json(step.measure.by_kind)},
          {"parameters", parameters_json(step.measure)},
          {"only_in_reference", step.measure.only_in_reference},
          {"only_in_candidate", step.measure.only_in_candidate},
          {"different_shapes", shapes_json(step.measure)}};
}

std::string key_text(const std::string& key) { return key; }
std::string key_text(std::int64_t key) { return std::to_string(key); }

}  // namespace

json statistics_json(const PairStatistics& s) {
  return {
      {"cosine", json_number(s.cosine())},
      {"relative_l2", json_number(s.relative_l2())},
      {"norm_ratio", json_number(s.norm_ratio())},
      {"sign_agreement", known(s.sign_agreement(), s)},
      {"update_cosine", known(s.update_cosine(), s)},
      {"elements", s.elements},
      {"reference_norm", json_number(s.reference_norm())},
      {"max_error", {{"value", known(s.error_quantile(1), s)}, {"parameter", s.max_error_parameter}, {"index", s.max_error_index}}},
      {"error_quantiles", quantiles_json(s)},
      {"nonfinite",
       {{"reference", s.reference_nonfinite}, {"candidate", s.candidate_nonfinite}, {"unmatched", s.unmatched_nonfinite}}},
      {"estimated", s.estimated}};
}

json gradient_json(const StepReport& step) {
  json result = statistics_json(step.measure.whole);
  result.erase("update_cosine");
  const auto& floor = step.judgement.noise_floor;
  result["noise_floor_relative_l2"] = floor ? json_number(*floor) : json(nullptr);
  result["multiples_of_noise_floor"] = floor && *floor > 0 ? json_number(step.measure.whole.relative_l2() / *floor) : json(nullptr);
  const auto* worst = step.measure.worst();
  result["worst_parameter"] =
      worst == nullptr ? json(nullptr) : json{{"name", worst->name}, {"relative_l2", json_number(worst->statistics.relative_l2())}};
  return result;
}

json checks_json(const Judgement& judgement) {
  json result = json::array();
  for (const auto& c : judgement.checks) {
    result.push_back({{"what", c.what},
                      {"measured", json_number(c.measured)},
                      {"bound", json_number(c.bound)},
                      {"reason", c.reason},
                      {"parameter", c.parameter.empty() ? json(nullptr) : json(c.parameter)},
                      {"pass", c.pass}});
  }
  return result;
}

json findings_json(const std::vector<Finding>& findings) {
  json result = json::array();
  for (const auto& f : findings) result.push_back({{"name", f.name}, {"evidence", f.evidence}, {"parameters", f.parameters}});
  return result;
}

template <class Key>
json breakdown_json(const std::map<Key, PairStatistics>& parts) {
  json result = json::object();
  for (const auto& [key, statistics] : parts) result[key_text(key)] = statistics_json(statistics);
  return result;
}
template json breakdown_json(const std::map<std::int64_t, PairStatistics>&);
template json breakdown_json(const std::map<std::string, PairStatistics>&);

json report_json(const Report& report) {
  json result{{"format", "longstraw-comparison"},
              {"format_version", 1},
              {"verdict", report.pass() ? "pass" : "fail"},
              {"exit_status", static_cast<int>(report.exit_status())},
              {"reference", facts_json(report.reference)},
              {"candidate", facts_json(report.candidate)},
              {"noise", report.noise ? json(*report.noise) : json(nullptr)},
              {"dtype", name_of_dtype(report.dtype)},
              {"steps", json::array()},
              {"steps_only_in_reference", report.steps_only_in_reference},
              {"steps_only_in_candidate", report.steps_only_in_candidate}};
  for (const auto& step : report.steps) result["steps"].push_back(step_json(step));
  return result;
}

}  // namespace longstraw::compare
