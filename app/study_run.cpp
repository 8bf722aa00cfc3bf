#include "app/study_run.h"

#include "app/build_info.h"
#include "app/interrupt.h"

#include "compare/bounds.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

namespace longstraw::app {
namespace {

using core::data::Batch;
using core::model::StepGradient;
using core::record::StudyCell;
using core::record::StudyKey;
using core::record::StudyRow;
using core::record::StudyScope;

template <class T>
std::span<const T> values_of(const at::Tensor& contiguous) {
  return {contiguous.const_data_ptr<T>(), size_t(contiguous.numel())};
}

// What is kept of a run beside the distance of its gradient.
void add_numbers(const std::string& prefix, const StepGradient& result, std::map<std::string, double>& numbers) {
  numbers[prefix + "loss"] = result.loss;
  numbers[prefix + "seconds"] = result.seconds.at("total");
  numbers[prefix + "peak_bytes"] = double(result.bytes.at("peak_bytes"));
  for (const char* name : {"recompute_mismatches", "changed_choices"}) {
    const auto found = result.facts.find(name);
    if (found != result.facts.end()) numbers[prefix + name] = found->second;
  }
}

compare::Dtype dtype_of(const RunConfig& config) {
  switch (config.model.dtype) {
    case core::model::Dtype::kFloat64: return compare::Dtype::kFloat64;
    case core::model::Dtype::kFloat32: return compare::Dtype::kFloat32;
    case core::model::Dtype::kBfloat16: break;
  }
  return compare::Dtype::kBfloat16;
}

// Borders that no segment of the other run has, as far as the prompt is long enough for that.
int64_t other_segments(int64_t segment_tokens, int64_t state_tokens) {
  return std::max<int64_t>(1, std::min(segment_tokens, state_tokens) * 2 / 3);
}

}  // namespace

StudyKey study_key(const RunConfig& config, const std::string& family, const std::string& model_name, const StudyPoint& point,
                   int64_t tail_tokens) {
  return {.family = family,
          .model = model_name,
          .arm = arm_of(tail_tokens, point.prompt_tokens),
          .dtype = std::string(core::config::name_of(config.model.dtype)),
          .prompt_tokens = point.prompt_tokens,
          .group_size = point.group_size,
          .response_tokens = point.response_tokens,
          .tail_tokens = tail_tokens,
          .seed = point.seed};
}

struct StudyRunner::Baseline {
  StepGradient exact;
  std::map<std::string, double> numbers;
  bool trusted = true;
};

StudyRunner::StudyRunner(const StudyRunOptions& options, const core::model::Decoder& decoder, StudyData& data,
                         core::record::StudyWriter& writer, Progress& progress, std::function<void(const StudyCell&)> finished)
    : options_(options), decoder_(decoder), data_(data), writer_(writer), progress_(progress), finished_(std::move(finished)) {}

StudyKey StudyRunner::key_of(const StudyPoint& point, int64_t tail_tokens) const {
  return study_key(options_.config, decoder_.architecture().model_type, options_.model_name, point, tail_tokens);
}

compare::StudyMeasurement StudyRunner::measure(const StepGradient& reference, const StepGradient& candidate) const {
  compare::StudyMeasurement measurement;
  const auto& parameters = decoder_.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor b = reference.gradients[i].to(at::kCPU).contiguous(), a = candidate.gradients[i].to(at::kCPU).contiguous();
    if (b.scalar_type() == at::kDouble) {
      measurement.add(parameters[i]->name, values_of<double>(b), values_of<double>(a));
    } else {
      measurement.add(parameters[i]->name, values_of<float>(b), values_of<float>(a));
    }
  }
  return measurement;
}

bool StudyRunner::within_bound(double relative_l2) const {
  const compare::Bounds bounds(dtype_of(options_.config), options_.config.compare, nullptr);
  const auto& bound = bounds.whole();
  if (relative_l2 <= bound->value) return true;
  progress_.say(
      fmt::format("  exact is at relative L2 {:.2e} from the full-graph reference, beyond {:.0e} ({}): these cells measure "
                  "against a gradient that is not whole",
                  relative_l2, bound->value, bound->reason));
  return false;
}

StudyRunner::Baseline StudyRunner::baseline_of(const Batch& batch, const StudyPoint& point) {
  Baseline baseline{.exact = run_arm(Arm::kExact, decoder_, batch, options_.config, progress_), .numbers = {}, .trusted = true};
  add_numbers("whole_", baseline.exact, baseline.numbers);
  if (point.prompt_tokens > options_.check_tokens) return baseline;
  const StepGradient full = run_arm(Arm::kReference, decoder_, batch, options_.config, progress_);
  add_numbers("check_", full, baseline.numbers);
  const std::vector<StudyRow> rows = measure(full, baseline.exact).rows();
  baseline.numbers["check_relative_l2"] = rows.front().relative_l2;
  baseline.numbers["check_cosine"] = rows.front().cosine;
  baseline.trusted = within_bound(rows.front().relative_l2);
  return baseline;
}

StepGradient StudyRunner::run_tail(const Batch& batch, const StudyPoint& point, int64_t tail_tokens) {
  RunConfig config = options_.config;
  if (tail_tokens == 0) return run_arm(Arm::kDetached, decoder_, batch, config, progress_);
  if (tail_tokens == point.prompt_tokens) {
    config.longstraw.segment_tokens = other_segments(config.longstraw.segment_tokens, point.prompt_tokens - 1);
    return run_arm(Arm::kExact, decoder_, batch, config, progress_);
  }
  config.longstraw.tail_tokens = tail_tokens;
  return run_arm(Arm::kTail, decoder_, batch, config, progress_);
}

bool StudyRunner::run(const StudyPoint& point) {
  const Batch batch = data_.batch(point);
  const core::record::StudyInputs inputs{.model_sha256 = decoder_.sha256(), .data_sha256 = core::data::data_sha256(batch)};
  std::vector<int64_t> missing;
  for (const int64_t tail : point.tails) {
    if (!writer_.has(key_of(point, tail), inputs)) missing.push_back(tail);
  }
  if (missing.empty()) return true;

  const Baseline baseline = baseline_of(batch, point);
  for (const int64_t tail : missing) {
    StudyCell cell{.key = key_of(point, tail), .inputs = inputs, .git_commit = kGitCommit, .numbers = baseline.numbers, .rows = {}};
    const StepGradient result = run_tail(batch, point, tail);
    add_numbers("", result, cell.numbers);
    cell.rows = measure(baseline.exact, result).rows();
    if (!options_.layer_and_kind)
      std::erase_if(cell.rows, [](const StudyRow& row) { return row.scope == StudyScope::kLayerAndKind; });
    {
      const WritingResults signals_wait;
      writer_.append(cell);
    }
    finished_(cell);
  }
  return baseline.trusted;
}

}  // namespace longstraw::app
