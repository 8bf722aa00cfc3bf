#pragma once
// Compares two records: measures, bounds, judges and diagnoses each step, and says it as a structure, a table or JSON.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "compare/bounds.h"
#include "compare/diagnose.h"
#include "compare/judge.h"
#include "compare/measure.h"
#include "core/base/errors.h"

namespace longstraw::compare {

struct RecordFacts {
  std::string path;
  core::record::RecordHeader header;
  bool closed = true;
};

struct StepReport {
  StepMeasure measure;
  Judgement judgement;
  std::vector<Finding> findings;
};

struct Report {
  RecordFacts reference, candidate;
  std::optional<std::string> noise;  // path of the noise record
  Dtype dtype = Dtype::kFloat32;     // whose rounding the bounds allow
  std::vector<StepReport> steps;     // those that both records have
  std::vector<std::int64_t> steps_only_in_reference, steps_only_in_candidate;

  // Every step within its bounds, and the same steps on both sides.
  bool pass() const;
  ExitStatus exit_status() const { return pass() ? ExitStatus::kWithinBounds : ExitStatus::kBeyondBounds; }
  // The step that is furthest from the reference.
  const StepReport& worst_step() const;
};

struct Policy {
  CompareConfig config;
  bool accept_unclosed = false;  // compare the whole steps of a run that was interrupted
};

// The reference's own distance from the noise record, for each step, so that several candidates measure it once.
struct NoiseRecord {
  NoiseRecord(const core::record::RecordReader& reference, const std::string& path, const Policy& policy);

  core::record::RecordReader record;
  std::map<std::int64_t, StepMeasure> reference;
};

// FormatError when a record can't be read, was not closed (unless accepted), or has other fixed inputs (model_sha256,
// data_sha256, seed; all that differ are named), and when there is no step in common.
Report compare_records(const std::string& reference, const std::string& candidate, const std::optional<std::string>& noise,
                       const Policy& policy);
// The same with records that are open already; `noise` may be null.
Report compare_records(const core::record::RecordReader& reference, const core::record::RecordReader& candidate,
                       const NoiseRecord* noise, const Policy& policy);
void require_usable(const core::record::RecordReader& record, const Policy& policy);
void require_same_inputs(const core::record::RecordReader& reference, const core::record::RecordReader& other);

// --- report_json.cpp. Non-finite numbers are the strings "inf", "-inf" and "nan"; what is not known is null.
nlohmann::json json_number(double value);
nlohmann::json statistics_json(const PairStatistics& statistics);
// The `gradient` object of a report: the statistics, the noise floor and the worst parameter.
nlohmann::json gradient_json(const StepReport& step);
nlohmann::json checks_json(const Judgement& judgement);
nlohmann::json findings_json(const std::vector<Finding>& findings);
template <class Key>
nlohmann::json breakdown_json(const std::map<Key, PairStatistics>& parts);
nlohmann::json report_json(const Report& report);

// --- report_text.cpp. At most 100 columns, except where a name is longer.
struct TextOptions {
  bool all_parameters = false;
};
std::string statistics_header(const std::string& title);
std::string statistics_row(const std::string& name, const PairStatistics& statistics, const std::optional<double>& noise_floor);
std::string report_text(const Report& report, const TextOptions& options = {});
std::string checks_text(const Judgement& judgement);
std::string findings_text(const std::vector<Finding>& findings);
// Words until the line is full, then a new line with the same indent.
std::string wrapped(const std::string& text, std::size_t indent);

}  // namespace longstraw::compare
