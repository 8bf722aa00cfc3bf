#include "compare/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace longstraw::compare {

using core::record::RecordReader;

bool Report::pass() const {
  return !steps.empty() && steps_only_in_reference.empty() && steps_only_in_candidate.empty() &&
         std::all_of(steps.begin(), steps.end(), [](const StepReport& s) { return s.judgement.pass(); });
}

const StepReport& Report::worst_step() const {
  const StepReport* worst = &steps.at(0);
  for (const auto& step : steps) {
    if (!(step.measure.whole.relative_l2() <= worst->measure.whole.relative_l2())) worst = &step;
  }
  return *worst;
}

void require_usable(const RecordReader& record, const Policy& policy) {
  if (!record.closed() && !policy.accept_unclosed) {
    throw FormatError(fmt::format("record {}: was not closed: the run that wrote it was interrupted (its {} steps are whole)",
                                  record.path(), record.steps().size()));
  }
}

void require_same_inputs(const RecordReader& reference, const RecordReader& other) {
  const auto &b = reference.header(), &a = other.header();
  std::string differences;
  const auto compare = [&](const char* name, const auto& wanted, const auto& got) {
    if (wanted != got) differences += fmt::format("{}{} {}, expected {}", differences.empty() ? "" : "; ", name, got, wanted);
  };
  compare("model_sha256", b.model_sha256, a.model_sha256);
  compare("data_sha256", b.data_sha256, a.data_sha256);
  compare("seed", b.seed, a.seed);
  if (!differences.empty()) {
    throw FormatError(fmt::format("record {}: other fixed inputs than {}: {}", other.path(), reference.path(), differences));
  }
}

NoiseRecord::NoiseRecord(const RecordReader& reference_record, const std::string& path, const Policy& policy) : record(path) {
  require_usable(record, policy);
  require_same_inputs(reference_record, record);
  if (!(dtype_of(record) < dtype_of(reference_record)) && dtype_of(reference_record) != Dtype::kFloat64) {
    throw FormatError(fmt::format("record {}: dtype {} is no wider than the reference's {}: it can't tell the reference's rounding",
                                  path, record.header().dtype, reference_record.header().dtype));
  }
  const auto own = record.steps();
  for (const std::int64_t step : reference_record.steps()) {
    if (!std::binary_search(own.begin(), own.end(), step)) {
      throw FormatError(fmt::format("record {}: /steps/{}: missing, the reference has it", path, core::record::step_name(step)));
    }
    reference.emplace(step, measure_step(record, reference_record, step));
    if (!reference.at(step).same_parameters()) {
      throw FormatError(
          fmt::format("record {}: /steps/{}: other parameters than the reference's", path, core::record::step_name(step)));
    }
  }
}

Report compare_records(const RecordReader& reference, const RecordReader& candidate, const NoiseRecord* noise,
                       const Policy& policy) {
  require_usable(reference, policy);
  require_usable(candidate, policy);
  require_same_inputs(reference, candidate);
  Report report{.reference = {reference.path(), reference.header(), reference.closed()},
                .candidate = {candidate.path(), candidate.header(), candidate.closed()},
                .noise = noise == nullptr ? std::nullopt : std::optional(noise->record.path()),
                .dtype = coarser(dtype_of(reference), dtype_of(candidate)),
                .steps = {},
                .steps_only_in_reference = {},
                .steps_only_in_candidate = {}};
  const auto b = reference.steps(), a = candidate.steps();
  std::set_difference(b.begin(), b.end(), a.begin(), a.end(), std::back_inserter(report.steps_only_in_reference));
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(report.steps_only_in_candidate));
  std::vector<std::int64_t> common;
  std::set_intersection(b.begin(), b.end(), a.begin(), a.end(), std::back_inserter(common));
  if (common.empty()) throw FormatError(fmt::format("records {} and {}: no step in common", reference.path(), candidate.path()));

  for (const std::int64_t step : common) {
    StepReport result;
    result.measure = measure_step(reference, candidate, step);
    std::optional<NoiseMeasure> floor;
    if (noise != nullptr) floor = NoiseMeasure{noise->reference.at(step), measure_step(noise->record, candidate, step)};
    const Bounds bounds(report.dtype, policy.config, floor ? &*floor : nullptr);
    result.judgement = judge(result.measure, floor ? &*floor : nullptr, bounds);
    result.findings = diagnose({.reference = reference, .candidate = candidate, .measure = result.measure, .bounds = bounds});
    report.steps.push_back(std::move(result));
  }
  return report;
}

Report compare_records(const std::string& reference, const std::string& candidate, const std::optional<std::string>& noise,
                       const Policy& policy) {
  const RecordReader b(reference), a(candidate);
  // Before the noise record is measured: what can't be compared is refused at once.
  require_usable(b, policy);
  require_usable(a, policy);
  require_same_inputs(b, a);
  std::optional<NoiseRecord> floor;
  if (noise) floor.emplace(b, *noise, policy);
  return compare_records(b, a, floor ? &*floor : nullptr, policy);
}

}  // namespace longstraw::compare
