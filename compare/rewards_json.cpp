#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "compare/report.h"
#include "compare/rewards.h"

namespace longstraw::compare {

using nlohmann::json;

namespace {

// What is not known is null.
json number(double value) { return std::isnan(value) ? json(nullptr) : json_number(value); }

json interval_json(const Interval& interval) { return {number(interval.low), number(interval.high)}; }

json side_json(const std::string& arm, const std::vector<std::string>& paths, const std::vector<std::int64_t>& seeds,
               const std::vector<double>& final, double mean) {
  return {{"arm", arm}, {"records", paths}, {"seeds", seeds}, {"final", final}, {"mean", mean}};
}

json curve_json(const std::vector<CurvePoint>& curve) {
  json points = json::array();
  for (const auto& p : curve) {
    points.push_back({{"step", p.step},
                      {"a", {{"mean", p.mean_a}, {"interval", interval_json(p.a)}}},
                      {"b", {{"mean", p.mean_b}, {"interval", interval_json(p.b)}}},
                      {"difference", {{"mean", p.mean_b - p.mean_a}, {"interval", interval_json(p.difference)}}}});
  }
  return points;
}

json whole_training_json(const RewardReport& report) {
  if (!report.whole_training) return nullptr;
  const auto& w = *report.whole_training;
  return {{"a", w.a},
          {"b", w.b},
          {"mean_a", w.mean_a},
          {"mean_b", w.mean_b},
          {"difference", w.mean_b - w.mean_a},
          {"interval", interval_json(w.difference)},
          {"p_different", number(w.p_different)}};
}

}  // namespace

json reward_report_json(const RewardReport& r) {
  const bool eval = r.measured_on == "eval";
  return {{"format", "longstraw-rewards"},
          {"format_version", 1},
          {"verdict", core::config::name_of(r.verdict)},
          {"exit_status", static_cast<int>(r.exit_status())},
          {"a", side_json(r.arm_a, r.a, r.seeds_a, r.final_a, r.mean_a)},
          {"b", side_json(r.arm_b, r.b, r.seeds_b, r.final_b, r.mean_b)},
          {"paired", r.paired},
          {"measured", {{"on", r.measured_on}, {"first_step", r.first_step}, {"last_step", r.last_step}}},
          {"level", r.policy.level},
          {"confidence", 1 - 2 * r.policy.level},
          {"margin",
           {{"reward", r.margin},
            {"kind", r.policy.absolute_margin ? "absolute" : "relative"},
            {"share", r.policy.absolute_margin ? json(nullptr) : json(r.policy.margin)}}},
          {"difference",
           {{"mean", r.mean_b - r.mean_a},
            {"interval", interval_json(r.difference)},
            {"bootstrap", interval_json(r.difference_bootstrap)}}},
          {"tests",
           {{"t", number(r.t)},
            {"degrees", number(r.degrees)},
            {"p_different", number(r.p_different)},
            {"p_lower", number(r.p_lower)},
            {"p_upper", number(r.p_upper)},
            {"p_equivalent", number(r.p_equivalent)}}},
          {"effect_size", number(r.effect_size)},
          {"kolmogorov_smirnov", eval ? json{{"statistic", r.ks_statistic}, {"p", r.ks_p}} : json(nullptr)},
          {"more_seeds", r.more_seeds ? json(*r.more_seeds) : json(nullptr)},
          {"whole_training", whole_training_json(r)},
          {"curves", {{"train", curve_json(r.train_curve)}, {"eval", curve_json(r.eval_curve)}}},
          {"notes", r.notes}};
}

}  // namespace longstraw::compare
