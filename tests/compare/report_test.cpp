// Reports: what they contain, and what is refused before there is one.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "compare/verify_report.h"
#include "core/record/writer.h"
#include "tests/compare/synthetic_run.h"
#include "tests/record/sample_record.h"

namespace longstraw::compare {
namespace {

using namespace testing;
using core::record::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

template <class E, class F>
std::string message_of(F action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "(no error of the expected type)";
}

struct ThreeArms {
  TemporaryFolder folder;
  SyntheticStep truth = synthetic_step();
  SyntheticStep reference = rounded(truth, 1e-6, 1);
  SyntheticStep exact = rounded(truth, 1e-6, 2);
  SyntheticStep detached = truth;

  ThreeArms() {
    for (const auto& [name, part] : truth.prompt_part) {
      for (std::size_t i = 0; i < part.values.size(); ++i) detached.gradients.at(name).values[i] -= part.values[i];
    }
    write_run(path("noise"), synthetic_header("reference", "float64"), {truth});
    write_run(path("reference"), synthetic_header("reference", "float32"), {reference});
    write_run(path("exact"), synthetic_header("exact", "float32"), {exact});
    write_run(path("detached"), synthetic_header("detached", "float32"), {detached});
  }
  static SyntheticStep rounded(SyntheticStep step, double size, std::uint64_t seed) {
    add_rounding(step, size, seed);
    return step;
  }
  std::string path(const std::string& name) const { return folder.file(name + ".h5"); }
  VerifyInputs inputs() const {
    return {.reference = path("reference"),
            .arms = {{"detached", path("detached")}, {"exact", path("exact")}},
            .noise = path("noise"),
            .config = {}};
  }
};

TEST(VerifyReport, HasTheContractsKeysAndTypes) {
  const ThreeArms run;
  const auto json = verify_json(verify_records(run.inputs()));
  EXPECT_EQ(json["format"], "longstraw-report");
  EXPECT_EQ(json["format_version"], 1);
  EXPECT_EQ(json["verdict"], "pass");
  EXPECT_EQ(json["exit_status"], 0);
  EXPECT_EQ(json["batch"]["prompts"], 1);
  EXPECT_EQ(json["batch"]["prompt_tokens"], nlohmann::json({500}));
  EXPECT_EQ(json["batch"]["group_size"], 4);
  EXPECT_EQ(json["batch"]["response_tokens"], nlohmann::json({6, 6, 6, 6}));
  for (const char* name : {"exact", "detached"}) {
    const auto& arm = json["arms"][name];
    for (const char* key : {"cosine", "relative_l2", "norm_ratio", "sign_agreement", "noise_floor_relative_l2"}) {
      EXPECT_TRUE(arm["gradient"][key].is_number()) << name << " " << key;
    }
    EXPECT_TRUE(arm["gradient"]["worst_parameter"]["name"].is_string());
    EXPECT_TRUE(arm["gradient"]["worst_parameter"]["relative_l2"].is_number());
    EXPECT_TRUE(arm["update_cosine"].is_number());
    EXPECT_EQ(arm["peak_bytes"], 1000);
    for (const char* phase : {"capture", "replay", "sweep", "total"}) EXPECT_TRUE(arm["seconds"][phase].is_number()) << phase;
    EXPECT_EQ(arm["loss"], 0.25);
  }
  EXPECT_EQ(json["arms"]["exact"]["verdict"], "pass");
  EXPECT_EQ(json["arms"]["detached"]["verdict"], "fail");
  EXPECT_EQ(json["arms"]["detached"]["findings"][0]["name"], "detached_prompt");
  EXPECT_EQ(json["arms"]["reference"]["peak_bytes"], 1000);
  EXPECT_EQ(json["arms"]["reference"]["seconds"]["total"], 2.0);
  EXPECT_EQ(json["arms"]["reference"]["loss"], 0.25);
}

TEST(VerifyReport, NumbersAreThoseOfTheComparison) {
  const ThreeArms run;
  const auto json = verify_json(verify_records(run.inputs()));
  const auto direct = compare_records(run.path("reference"), run.path("exact"), std::nullopt, {});
  const auto floor = compare_records(run.path("noise"), run.path("reference"), std::nullopt, {});
  EXPECT_EQ(json["arms"]["exact"]["gradient"]["relative_l2"], direct.steps[0].measure.whole.relative_l2());
  EXPECT_EQ(json["arms"]["exact"]["gradient"]["noise_floor_relative_l2"], floor.steps[0].measure.whole.relative_l2());
}

TEST(VerifyReport, NoiseFloorIsNullWithoutANoiseRecord) {
  const ThreeArms run;
  auto inputs = run.inputs();
  inputs.noise.reset();
  EXPECT_TRUE(verify_json(verify_records(inputs))["arms"]["exact"]["gradient"]["noise_floor_relative_l2"].is_null());
}

TEST(VerifyReport, OnlyGatedArmsDecide) {
  const ThreeArms run;
  auto inputs = run.inputs();
  inputs.config.gate = {"exact", "detached"};
  const auto report = verify_records(inputs);
  EXPECT_FALSE(report.pass());
  EXPECT_EQ(report.exit_status(), ExitStatus::kBeyondBounds);
  inputs.config.gate = {};
  EXPECT_THAT(message_of<ConfigError>([&] { verify_records(inputs); }), HasSubstr("compare.gate: is empty"));
  inputs.config.gate = {"tail"};
  EXPECT_THAT(message_of<ConfigError>([&] { verify_records(inputs); }),
              HasSubstr("tail is no arm of this run (arms: detached, exact)"));
}

TEST(VerifyReport, TextShowsWhatDetachingDoesByKindAndLayer) {
  const ThreeArms run;
  const auto text = verify_text(verify_records(run.inputs()));
  EXPECT_THAT(text, AllOf(HasSubstr("self_attn.k_proj.weight"), HasSubstr("layer 3"), HasSubstr("detached_prompt"),
                          HasSubstr("verdict: pass")));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100U) << line;
}

TEST(VerifyReport, ANonFiniteGradientIsWrittenAsText) {
  const ThreeArms run;
  auto broken = run.exact;
  broken.gradients.begin()->second.values[0] = std::numeric_limits<double>::quiet_NaN();
  write_run(run.path("exact"), synthetic_header("exact", "float32"), {broken});
  const auto report = verify_records(run.inputs());
  EXPECT_FALSE(report.pass());
  const auto json = verify_json(report);
  EXPECT_EQ(json["arms"]["exact"]["gradient"]["relative_l2"], "inf");
  EXPECT_EQ(json["arms"]["exact"]["gradient"]["cosine"], "nan");
  EXPECT_NO_THROW(nlohmann::json::parse(json.dump()));
}

TEST(Report, TableFitsAHundredColumns) {
  const ThreeArms run;
  const auto report = compare_records(run.path("reference"), run.path("detached"), run.path("noise"), {});
  std::istringstream lines(report_text(report, {.all_parameters = true}));
  for (std::string line; std::getline(lines, line);) {
    if (line.find(".h5") != std::string::npos) continue;  // paths may be longer
    EXPECT_LE(line.size(), 100U) << line;
  }
}

TEST(Report, JsonHoldsEveryParameter) {
  const ThreeArms run;
  const auto json = report_json(compare_records(run.path("reference"), run.path("exact"), std::nullopt, {}));
  EXPECT_EQ(json["format"], "longstraw-comparison");
  EXPECT_EQ(json["steps"][0]["parameters"].size(), run.truth.gradients.size());
  EXPECT_EQ(json["steps"][0]["by_layer"].size(), 4U);
}

TEST(Report, RefusesOtherFixedInputsAndSaysWhich) {
  const ThreeArms run;
  auto header = synthetic_header("exact", "float32");
  header.data_sha256 = "other";
  header.seed = 4;
  write_run(run.path("exact"), header, {run.exact});
  const auto message =
      message_of<FormatError>([&] { compare_records(run.path("reference"), run.path("exact"), std::nullopt, {}); });
  EXPECT_THAT(message,
              AllOf(HasSubstr("data_sha256 other, expected b2"), HasSubstr("seed 4, expected 3"), Not(HasSubstr("model_sha256"))));
  EXPECT_THAT(message_of<FormatError>([&] { verify_records(run.inputs()); }), HasSubstr("exact.h5"));
}

TEST(Report, RefusesAnInterruptedRunUnlessAsked) {
  const ThreeArms run;
  const auto path = run.path("interrupted");
  {
    core::record::RecordWriter writer(path, synthetic_header("exact", "float32"));
    auto step = writer.begin_step(0);
    step.memory({{"peak_bytes", 1}});
    step.timing({{"total", 1}});
    step.commit();
  }
  EXPECT_THAT(message_of<FormatError>([&] { compare_records(run.path("reference"), path, std::nullopt, {}); }),
              HasSubstr("was not closed"));
  const auto report = compare_records(run.path("reference"), path, std::nullopt, {.config = {}, .accept_unclosed = true});
  EXPECT_FALSE(report.pass()) << "it has no gradients";
}

TEST(Report, StepsOfOneSideOnlyAreNamedAndFail) {
  const ThreeArms run;
  write_run(run.path("longer"), synthetic_header("exact", "float32"), {run.reference, run.reference});
  const auto report = compare_records(run.path("reference"), run.path("longer"), std::nullopt, {});
  EXPECT_EQ(report.steps_only_in_candidate, std::vector<std::int64_t>{1});
  EXPECT_TRUE(report.steps[0].judgement.pass());
  EXPECT_FALSE(report.pass());
  EXPECT_THAT(report_text(report), HasSubstr("steps only in the candidate: 1"));
}

TEST(Report, ANoiseRecordMustBeWiderThanTheReference) {
  const ThreeArms run;
  EXPECT_THAT(message_of<FormatError>([&] { compare_records(run.path("reference"), run.path("exact"), run.path("exact"), {}); }),
              HasSubstr("no wider than the reference's float32"));
}

TEST(Report, AnUnknownDtypeIsRefused) {
  const ThreeArms run;
  write_run(run.path("exact"), synthetic_header("exact", "float8"), {run.exact});
  EXPECT_THAT(message_of<FormatError>([&] { compare_records(run.path("reference"), run.path("exact"), std::nullopt, {}); }),
              HasSubstr("dtype float8, expected float64, float32 or bfloat16"));
}

}  // namespace
}  // namespace longstraw::compare
