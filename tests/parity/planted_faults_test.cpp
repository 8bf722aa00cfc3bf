// Faults planted into LongStraw's run of a tiny model of every family are caught by the comparator and called by their
// names, from the records of two runs alone; a run without a fault gets no name.
#include "tests/parity/planted_faults.h"

#include "compare/report.h"
#include "core/record/writer.h"
#include "longstraw/step_trace.h"
#include "longstraw/trainer.h"
#include "reference/gradient.h"
#include "tests/support/families.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <deque>

namespace longstraw {
namespace {

using core::data::Batch;
using core::model::Decoder;
using core::model::StepGradient;
using test::Fault;

constexpr int64_t kPromptTokens = 48, kSegment = 16;

// A group of four, whose rewards differ.
Batch batch_for(const Decoder& decoder) {
  Batch batch{test::random_group(decoder.architecture().vocab, kPromptTokens, {12, 9, 12, 7}, 11)};
  const double rewards[] = {1.0, 0.0, 0.6, 0.2};
  for (size_t m = 0; m < batch[0].responses.size(); ++m) batch[0].responses[m].reward = rewards[m];
  return batch;
}

StepGradient reference_step(const Decoder& decoder, const Batch& batch, bool trace) {
  return reference::reference_gradient(decoder, batch, {.run = {.trace = trace}, .objective = {}});
}

// LongStraw's exact arm, two responses a replay, every segment computed again.
StepGradient longstraw_step(const Decoder& decoder, const Batch& batch, const Fault& fault, bool trace = true) {
  const GrpoObjective objective(batch, {}, 1.0, 1);
  const TokenTree tree = build_token_tree(batch, {.segment_tokens = kSegment});
  GradientStore gradients(decoder);
  StepTracer tracer;
  // Operations' faults lie under the trace, blocks' above; the layers of one pass outlive it.
  std::deque<std::unique_ptr<core::model::Execution>> layers;
  SweepOptions options{.replay_batch = 2, .lengths = sequence_lengths(batch), .before_backward = fault.before_backward};
  options.around = [&](core::model::Execution& execution, const ForwardPass& pass) -> std::unique_ptr<core::model::Execution> {
    core::model::Execution* outermost = &execution;
    const auto wrap = [&](std::unique_ptr<core::model::Execution> layer) {
      if (layer) outermost = layers.emplace_back(std::move(layer)).get();
    };
    if (fault.operation) wrap(fault.operation(*outermost, pass));
    if (trace) wrap(tracer.around(*outermost, pass));
    if (fault.block) wrap(fault.block(*outermost, pass));
    return std::make_unique<core::model::DelegatingExecution>(*outermost);
  };
  const SweepResult swept = sweep(decoder, batch, tree, objective, {}, options, gradients);
  StepGradient step;
  step.gradients = gradients.release();
  step.loss = swept.policy + swept.kl;
  step.logprobs = swept.logprobs;
  step.advantages = objective.advantages();
  if (trace) step.traces = tracer.traces(batch);
  step.facts = {{"changed_choices", double(swept.changed_choices)}, {"recompute_mismatches", double(swept.recompute_mismatches)}};
  return step;
}

void write(const std::string& path, const std::string& arm, const Decoder& decoder, const Batch& batch, const StepGradient& step) {
  using namespace core::record;
  RecordHeader header{.arm = arm,
                      .config_yaml = "",
                      .model_sha256 = decoder.sha256(),
                      .data_sha256 = "one batch",
                      .dtype = "float64",
                      .device = "cpu"};
  RecordWriter writer(path, header, {.replace = true, .durable = false});
  StepWriter out = writer.begin_step(0);
  for (size_t i = 0; i < step.gradients.size(); ++i) {
    const at::Tensor gradient = step.gradients[i].contiguous();
    out.gradient(decoder.parameters()[i]->name, gradient.sizes().vec(), gradient.const_data_ptr<double>());
  }
  for (size_t m = 0; m < batch[0].responses.size(); ++m) {
    const auto& response = batch[0].responses[m];
    out.response({.prompt_id = batch[0].prompt_id,
                  .member = int64_t(m),
                  .prompt_length = kPromptTokens,
                  .last_prompt_token = batch[0].prompt_ids.back(),
                  .tokens = response.completion_ids,
                  .mask = std::vector<uint8_t>(response.completion_ids.size(), 1),
                  .policy_logprobs = step.logprobs[0][m],
                  .trace = step.traces.empty() ? core::model::Trace{} : step.traces[0][m],
                  .reward = response.reward,
                  .advantage = step.advantages[0][m]});
  }
  out.objective({{"loss", step.loss}});
  out.memory({{"peak_bytes", 1}});
  out.timing({{"total", 1.0}});
  std::map<std::string, int64_t> checks;
  for (const auto& [name, count] : step.facts) checks[name] = int64_t(count);
  if (!checks.empty() && arm != "reference") out.checks(checks);
  out.commit();
  writer.close();
}

struct Verdict {
  bool pass = false;
  double relative_l2 = 0.0;
  std::vector<std::string> names;
};

class PlantedFaults : public testing::TestWithParam<test::Family> {
 protected:
  void SetUp() override {
    decoder_ = test::tiny_decoder(GetParam().config, at::kDouble);
    batch_ = batch_for(*decoder_);
    reference_ = reference_step(*decoder_, batch_, /*trace=*/true);
    write(path("reference"), "reference", *decoder_, batch_, reference_);
  }
  std::string path(const std::string& arm) const { return (folder_.path() / (arm + ".h5")).string(); }

  Verdict judge(const Fault& fault) {
    write(path("exact"), "exact", *decoder_, batch_, longstraw_step(*decoder_, batch_, fault));
    const auto report = compare::compare_records(path("reference"), path("exact"), std::nullopt, {});
    Verdict verdict{report.pass(), report.steps.at(0).measure.whole.relative_l2(), {}};
    for (const auto& finding : report.steps.at(0).findings) verdict.names.push_back(finding.name);
    printf("    %-22s %-28s %9.2e  %s\n", GetParam().name.c_str(), fault.what.c_str(), verdict.relative_l2,
           fmt::format("{}", fmt::join(verdict.names, ", ")).c_str());
    return verdict;
  }

  test::TemporaryFolder folder_;
  std::unique_ptr<Decoder> decoder_;
  Batch batch_;
  StepGradient reference_;
};

TEST_P(PlantedFaults, AreCaughtAndNamed) {
  for (const Fault& fault : test::faults_of(*decoder_)) {
    const Verdict verdict = judge(fault);
    EXPECT_FALSE(verdict.pass) << fault.what;
    ASSERT_EQ(verdict.names.size(), 1u) << fault.what;
    const bool second = !fault.also.empty() && verdict.names[0] == fault.also;
    EXPECT_EQ(verdict.names[0], second ? fault.also : fault.name) << fault.what;
  }
}

TEST_P(PlantedFaults, NoFaultHasNoName) {
  for (const Fault& fault : test::no_faults_of(*decoder_)) {
    const Verdict verdict = judge(fault);
    EXPECT_TRUE(verdict.pass) << fault.what;
    EXPECT_TRUE(verdict.names.empty()) << fault.what;
  }
}

// What the comparator's names rest on: both sides pass the same points, with the same numbers to rounding, choices exactly.
TEST_P(PlantedFaults, TracesOfARightRunAgree) {
  const auto step = longstraw_step(*decoder_, batch_, {});
  for (size_t m = 0; m < batch_[0].responses.size(); ++m) {
    const auto &wanted = reference_.traces[0][m], &got = step.traces[0][m];
    ASSERT_EQ(got.size(), wanted.size());
    ASSERT_GT(wanted.size(), 8u * size_t(decoder_->layers()) / 2);
    for (const auto& [point, numbers] : wanted) {
      ASSERT_TRUE(got.contains(point)) << point;
      const bool choice = point.ends_with(".keys") || point.ends_with(".experts");
      for (size_t t = 0; t < numbers.size(); ++t) {
        EXPECT_NEAR(got.at(point)[t], numbers[t], choice ? 0.0 : 1e-9 * (1.0 + std::abs(numbers[t]))) << point << " token " << t;
      }
    }
  }
}

TEST_P(PlantedFaults, ATraceChangesNoBit) {
  const auto expect_equal = [&](const StepGradient& traced, const StepGradient& plain) {
    EXPECT_TRUE(plain.traces.empty());
    EXPECT_EQ(traced.logprobs, plain.logprobs);
    for (size_t i = 0; i < plain.gradients.size(); ++i) {
      EXPECT_TRUE(at::equal(traced.gradients[i], plain.gradients[i])) << decoder_->parameters()[i]->name;
    }
  };
  expect_equal(reference_, reference_step(*decoder_, batch_, /*trace=*/false));
  const TrainerOptions options{.longstraw = {.segment_tokens = kSegment, .replay_batch = 2}};
  TrainerOptions with_trace = options;
  with_trace.trace = true;
  const auto traced = longstraw_gradient(*decoder_, batch_, with_trace);
  EXPECT_EQ(traced.traces.at(0).size(), batch_[0].responses.size());
  expect_equal(traced, longstraw_gradient(*decoder_, batch_, options));
}

INSTANTIATE_TEST_SUITE_P(Families, PlantedFaults, testing::ValuesIn(test::small_families()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace longstraw
