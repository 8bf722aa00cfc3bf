#include "compare/verify_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace longstraw::compare {
namespace {

using core::record::RecordReader;
using nlohmann::json;

ArmFacts facts_of(const RecordReader& record) {
  ArmFacts facts;
  for (const std::int64_t step : record.steps()) {
    const auto memory = record.memory(step);
    const auto timing = record.timing(step);
    const std::string place = fmt::format("record {}: /steps/{}", record.path(), core::record::step_name(step));
    if (!memory.contains("peak_bytes")) throw FormatError(place + "/memory: peak_bytes is missing");
    if (!timing.contains("total")) throw FormatError(place + "/timing: total is missing");
    facts.peak_bytes = std::max(facts.peak_bytes, memory.at("peak_bytes"));
    for (const auto& [phase, seconds] : timing) facts.seconds[phase] += seconds;
    const auto objective = record.objective(step);
    if (objective.contains("loss")) facts.loss = objective.at("loss");
  }
  return facts;
}

BatchFacts batch_of(const RecordReader& record) {
  BatchFacts batch;
  std::map<std::int64_t, std::int64_t> lengths, sizes;
  for (const std::int64_t step : record.steps()) {
    // The batch of the first step; later ones have its shape in every run that verify makes.
    for (const auto& response : record.responses(step)) {
      lengths[response.group] = response.prompt_length;
      ++sizes[response.group];
      batch.response_tokens.push_back(static_cast<std::int64_t>(response.tokens.size()));
    }
    break;
  }
  for (const auto& [group, length] : lengths) batch.prompt_tokens.push_back(length);
  for (const auto& [group, size] : sizes) batch.group_size = std::max(batch.group_size, size);
  batch.prompts = static_cast<std::int64_t>(lengths.size());
  return batch;
}

void require_gate(const VerifyInputs& inputs) {
  if (inputs.config.gate.empty()) throw ConfigError("compare.gate: is empty, no arm would decide");
  std::vector<std::string> names;
  for (const auto& [name, path] : inputs.arms) names.push_back(name);
  for (const auto& gated : inputs.config.gate) {
    if (std::find(names.begin(), names.end(), gated) == names.end()) {
      throw ConfigError(fmt::format("compare.gate: {} is no arm of this run (arms: {})", gated, fmt::join(names, ", ")));
    }
  }
}

json facts_json(const ArmFacts& facts) {
  json seconds = json::object();
  for (const auto& [phase, value] : facts.seconds) seconds[phase] = json_number(value);
  return {{"peak_bytes", facts.peak_bytes}, {"seconds", seconds}, {"loss", facts.loss ? json_number(*facts.loss) : json(nullptr)}};
}

json arm_json(const ArmReport& arm) {
  json result = facts_json(arm.facts);
  // Phases that an arm does not have take no time.
  for (const char* phase : {"capture", "replay", "sweep"}) {
    if (!result["seconds"].contains(phase)) result["seconds"][phase] = 0.0;
  }
  const StepReport& worst = arm.comparison.worst_step();
  result["gradient"] = gradient_json(worst);
  result["update_cosine"] = statistics_json(worst.measure.whole)["update_cosine"];
  result["verdict"] = arm.comparison.pass() ? "pass" : "fail";
  result["checks"] = checks_json(worst.judgement);
  result["findings"] = findings_json(worst.findings);
  result["by_kind"] = breakdown_json(worst.measure.by_kind);
  result["by_layer"] = breakdown_json(worst.measure.by_layer);
  result["steps"] = arm.comparison.steps.size();
  return result;
}

std::string mebibytes(std::int64_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / (1 << 20)); }

double total_of(const ArmFacts& facts) { return facts.seconds.contains("total") ? facts.seconds.at("total") : 0; }

std::string arm_row(const std::string& name, const ArmFacts& facts, const Report* comparison, bool gated) {
  const std::string loss = facts.loss ? fmt::format("{:.6f}", *facts.loss) : "-";
  if (comparison == nullptr) {
    return fmt::format("{:<10} {:>9} {:>10} {:>9} {:>8} {:>9} {:>10} {:>10}  {}\n", name, "-", "-", "-", "-",
                       fmt::format("{:.2f}", total_of(facts)), mebibytes(facts.peak_bytes), loss, "");
  }
  const auto& s = comparison->worst_step().measure.whole;
  return fmt::format("{:<10} {:>9.6f} {:>10.3e} {:>9.6f} {:>8} {:>9.2f} {:>10} {:>10}  {}{}\n", name, s.cosine(), s.relative_l2(),
                     s.norm_ratio(), s.estimated ? "-" : fmt::format("{:.4f}", s.update_cosine()), total_of(facts),
                     mebibytes(facts.peak_bytes), loss, comparison->pass() ? "pass" : "fail", gated ? " *" : "");
}

std::string arm_details(const ArmReport& arm) {
  const StepReport& step = arm.comparison.worst_step();
  const auto& floor = step.judgement.noise_floor;
  std::string text = fmt::format("\n{} against the reference\n\n", arm.name) + statistics_header("kind");
  for (const auto& [kind, s] : step.measure.by_kind) text += statistics_row(kind, s, floor);
  if (!step.measure.by_layer.empty()) text += fmt::format("\n{}", statistics_header("layer"));
  for (const auto& [layer, s] : step.measure.by_layer) text += statistics_row(fmt::format("layer {}", layer), s, floor);
  text += fmt::format("\n{}", checks_text(step.judgement));
  if (!step.findings.empty()) text += fmt::format("\n{}", findings_text(step.findings));
  return text;
}

}  // namespace

bool VerifyReport::pass() const {
  return !gate.empty() && std::all_of(gate.begin(), gate.end(), [&](const std::string& name) {
    return std::any_of(arms.begin(), arms.end(), [&](const ArmReport& arm) { return arm.name == name && arm.comparison.pass(); });
  });
}

VerifyReport verify_records(const VerifyInputs& inputs) {
  require_gate(inputs);
  const Policy policy{.config = inputs.config};
  const RecordReader reference(inputs.reference);
  require_usable(reference, policy);
  std::optional<NoiseRecord> noise;
  if (inputs.noise) noise.emplace(reference, *inputs.noise, policy);
  VerifyReport report{.batch = batch_of(reference), .reference = facts_of(reference), .arms = {}, .gate = inputs.config.gate};
  for (const auto& [name, path] : inputs.arms) {
    const RecordReader arm(path);
    auto comparison = compare_records(reference, arm, noise ? &*noise : nullptr, policy);
    report.arms.push_back({name, facts_of(arm), std::move(comparison)});
  }
  return report;
}

json verify_json(const VerifyReport& report) {
  json arms = json::object();
  arms["reference"] = facts_json(report.reference);
  for (const auto& arm : report.arms) arms[arm.name] = arm_json(arm);
  return {{"format", "longstraw-report"},
          {"format_version", 1},
          {"verdict", report.pass() ? "pass" : "fail"},
          {"exit_status", static_cast<int>(report.exit_status())},
          {"gate", report.gate},
          {"batch",
           {{"prompts", report.batch.prompts},
            {"prompt_tokens", report.batch.prompt_tokens},
            {"group_size", report.batch.group_size},
            {"response_tokens", report.batch.response_tokens}}},
          {"arms", arms}};
}

std::string verify_text(const VerifyReport& report) {
  const auto& b = report.batch;
  std::string text = fmt::format("{} prompt(s) of {} tokens, {} responses a group, {} response tokens in all\n\n", b.prompts,
                                 fmt::join(b.prompt_tokens, ", "), b.group_size, [&] {
                                   std::int64_t sum = 0;
                                   for (const std::int64_t n : b.response_tokens) sum += n;
                                   return sum;
                                 }());
  text += fmt::format("{:<10} {:>9} {:>10} {:>9} {:>8} {:>9} {:>10} {:>10}  {}\n", "arm", "cosine", "rel. L2", "ratio", "update",
                      "seconds", "peak MiB", "loss", "verdict");
  text += arm_row("reference", report.reference, nullptr, false);
  for (const auto& arm : report.arms) {
    const bool gated = std::find(report.gate.begin(), report.gate.end(), arm.name) != report.gate.end();
    text += arm_row(arm.name, arm.facts, &arm.comparison, gated);
  }
  text += "(* decides the verdict)\n";
  if (!report.arms.empty()) {
    const auto& floor = report.arms.front().comparison.worst_step().judgement.noise_floor;
    if (floor) text += fmt::format("noise floor: the reference's own relative L2 from the wider record is {:.3e}\n", *floor);
  }
  for (const auto& arm : report.arms) text += arm_details(arm);
  return text + fmt::format("\nverdict: {}\n", report.pass() ? "pass" : "fail");
}

}  // namespace longstraw::compare
