// Each planted fault is beyond bounds and called by its name; rounding is called nothing.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "compare/report.h"
#include "tests/compare/synthetic_run.h"
#include "tests/record/sample_record.h"

namespace longstraw::compare {
namespace {

using namespace testing;
using core::record::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

struct Verdict {
  bool pass = false;
  std::vector<Finding> findings;
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& f : findings) result.push_back(f.name);
    return result;
  }
};

Verdict compare(const std::vector<SyntheticStep>& reference, const std::vector<SyntheticStep>& candidate,
                const std::string& dtype) {
  const TemporaryFolder folder;
  const auto report =
      compare_records(write_run(folder.file("reference.h5"), synthetic_header("reference", dtype), reference),
                      write_run(folder.file("exact.h5"), synthetic_header("exact", dtype), candidate), std::nullopt, {});
  return {report.pass(), report.steps.back().findings};
}

// Rounding of the size that the dtype makes on a whole gradient; the faults must show through it.
double rounding(const std::string& dtype) { return dtype == "float64" ? 1e-14 : dtype == "float32" ? 1e-6 : 1e-2; }

class Fault : public ::testing::TestWithParam<std::string> {
 protected:
  SyntheticStep reference = synthetic_step();
  SyntheticStep candidate = reference;
  Gradient& gradient(const std::string& name) { return candidate.gradients.at(name); }
  Verdict verdict() {
    add_rounding(candidate, rounding(GetParam()), 99);
    return compare({reference}, {candidate}, GetParam());
  }
  // What another gradient everywhere looks like, apart from the output matrix.
  void disturb_all_but_output_matrix() {
    const auto other = synthetic_step({.seed = 77});
    for (auto& [name, g] : candidate.gradients) {
      if (name == "lm_head.weight" || (name == "model.embed_tokens.weight" && !candidate.gradients.contains("lm_head.weight")))
        continue;
      for (std::size_t i = 0; i < g.values.size(); ++i) g.values[i] += 0.4 * other.gradients.at(name).values[i];
    }
  }
  void scale(const std::string& name, double factor) {
    for (double& v : gradient(name).values) v *= factor;
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, Fault, ::testing::Values("float64", "float32", "bfloat16"), [](const auto& i) { return i.param; });

TEST_P(Fault, RoundingHasNoName) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    candidate = reference;
    add_rounding(candidate, rounding(GetParam()), seed);
    const auto v = compare({reference}, {candidate}, GetParam());
    EXPECT_TRUE(v.pass);
    EXPECT_THAT(v.findings, IsEmpty());
  }
}

TEST_P(Fault, WrongSignOfOneParameter) {
  scale("model.layers.1.mlp.up_proj.weight", -1);
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("wrong_sign"));
  EXPECT_THAT(v.findings[0].parameters, ElementsAre("model.layers.1.mlp.up_proj.weight"));
}

TEST_P(Fault, WrongSignOfTheWhole) {
  for (const auto& [name, g] : reference.gradients) scale(name, -1);
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("wrong_sign"));
  EXPECT_THAT(v.findings[0].evidence, HasSubstr("the whole gradient is reversed"));
}

TEST_P(Fault, ZeroedParameter) {
  scale("model.norm.weight", 0);
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("zeroed_parameter"));
  EXPECT_THAT(v.findings[0].evidence, HasSubstr("model.norm.weight"));
}

TEST_P(Fault, ZeroedLayer) {
  for (const auto& [name, g] : reference.gradients) {
    if (name.find("layers.2.") != std::string::npos) scale(name, 0);
  }
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("zeroed_layer"));
  EXPECT_THAT(v.findings[0].evidence, HasSubstr("layer 2"));
}

TEST_P(Fault, ZeroedEverything) {
  for (const auto& [name, g] : reference.gradients) scale(name, 0);
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("zero_gradient"));
}

TEST_P(Fault, MissingBiasGradient) {
  for (const auto& [name, g] : reference.gradients) {
    if (name.ends_with(".bias")) scale(name, 0);
  }
  EXPECT_THAT(verdict().names(), ElementsAre("missing_bias_gradient"));
}

TEST_P(Fault, BiasesAbsentFromTheRecord) {
  std::erase_if(candidate.gradients, [](const auto& entry) { return entry.first.ends_with(".bias"); });
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("missing_bias_gradient"));
}

TEST_P(Fault, MissingKeyAndValueGradient) {
  for (const auto& [name, g] : reference.gradients) {
    if (name.find("k_proj.weight") != std::string::npos || name.find("v_proj.weight") != std::string::npos) scale(name, 0);
  }
  EXPECT_THAT(verdict().names(), ElementsAre("missing_key_value_gradient"));
}

TEST_P(Fault, PartOfTheKeyAndValueGradientMissing) {
  // Not accumulated over segments: only these weights lose their prompt part.
  for (const auto& [name, part] : reference.prompt_part) {
    if (name.find("k_proj") == std::string::npos && name.find("v_proj") == std::string::npos) continue;
    for (std::size_t i = 0; i < part.values.size(); ++i) gradient(name).values[i] -= part.values[i];
  }
  EXPECT_THAT(verdict().names(), ElementsAre("missing_key_value_gradient"));
}

TEST_P(Fault, MissingReduction) {
  for (const auto& [name, g] : reference.gradients) scale(name, 0.25);
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("constant_factor"));
  EXPECT_THAT(v.findings[0].evidence, AllOf(HasSubstr("the whole gradient is 1/4 times"), HasSubstr("reduction")));
}

TEST_P(Fault, MissingReductionOfOneParameter) {
  scale("model.layers.0.self_attn.v_proj.weight", 0.5);
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("constant_factor"));
  EXPECT_THAT(v.findings[0].evidence, AllOf(HasSubstr("v_proj"), HasSubstr("1/2")));
}

TEST_P(Fault, CountedTwice) {
  for (const auto& [name, g] : reference.gradients) scale(name, 2);
  const auto v = verdict();
  EXPECT_THAT(v.names(), ElementsAre("constant_factor"));
  EXPECT_THAT(v.findings[0].evidence, HasSubstr("is 2 times"));
}

TEST_P(Fault, SwappedLayers) {
  for (auto& [name, g] : candidate.gradients) {
    const auto at = name.find("layers.0.");
    if (at == std::string::npos) continue;
    std::string other = name;
    other[at + 7] = '2';
    std::swap(g.values, gradient(other).values);
  }
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("swapped_layers"));
  EXPECT_THAT(v.findings[0].evidence, HasSubstr("layers 0 and 2"));
}

TEST_P(Fault, SwappedKeyAndValueOfOneLayer) {
  std::swap(gradient("model.layers.1.self_attn.k_proj.weight").values, gradient("model.layers.1.self_attn.v_proj.weight").values);
  const auto v = verdict();
  EXPECT_THAT(v.names(), ElementsAre("swapped_parameters"));
  EXPECT_THAT(v.findings[0].evidence, AllOf(HasSubstr("k_proj"), HasSubstr("v_proj")));
}

TEST_P(Fault, TransposedSquareParameter) {
  auto& g = gradient("model.layers.3.self_attn.o_proj.weight");
  const auto old = g.values;
  const auto n = static_cast<std::size_t>(g.shape[0]);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < n; ++j) g.values[i * n + j] = old[j * n + i];
  }
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("transposed_parameter"));
}

TEST_P(Fault, TransposedParameterOfAnotherShape) {
  auto& g = gradient("model.layers.3.mlp.up_proj.weight");
  std::swap(g.shape[0], g.shape[1]);
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("transposed_parameter"));
}

TEST_P(Fault, NonFiniteValue) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    candidate = reference;
    add_rounding(candidate, rounding(GetParam()), 99);
    gradient("model.layers.0.self_attn.q_proj.weight").values[5] = bad;
    const auto v = compare({reference}, {candidate}, GetParam());
    EXPECT_FALSE(v.pass);
    EXPECT_THAT(v.names(), ElementsAre("non_finite"));
    EXPECT_THAT(v.findings[0].evidence, AllOf(HasSubstr("q_proj"), HasSubstr("index 5")));
  }
}

TEST_P(Fault, DetachedPrompt) {
  for (const auto& [name, part] : reference.prompt_part) {
    for (std::size_t i = 0; i < part.values.size(); ++i) gradient(name).values[i] -= part.values[i];
  }
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("detached_prompt"));
}

TEST_P(Fault, PromptCutInTheMiddle) {
  for (const auto& [name, part] : reference.prompt_part) {
    for (std::size_t i = 0; i < part.values.size(); ++i) gradient(name).values[i] -= 0.6 * part.values[i];
  }
  EXPECT_THAT(verdict().names(), ElementsAre("detached_prompt"));
}

TEST_P(Fault, SwappedMembersInTheRecord) {
  std::swap(candidate.responses[0].advantage, candidate.responses[2].advantage);
  disturb_all_but_output_matrix();
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("swapped_members"));
  EXPECT_THAT(v.findings[0].evidence, HasSubstr("advantages: member 0 of group 0 has what belongs to member 2"));
}

TEST_P(Fault, SwappedMembersInTheGradientOnly) {
  const double a0 = reference.responses[0].advantage, a1 = reference.responses[1].advantage;
  candidate = synthetic_step({.member_weight = {{0, a1 / a0}, {1, a0 / a1}}});
  disturb_all_but_output_matrix();
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("swapped_members"));
}

TEST_P(Fault, MissingMember) {
  candidate = synthetic_step({.member_weight = {{1, 0.0}}});
  disturb_all_but_output_matrix();
  const auto v = verdict();
  EXPECT_THAT(v.names(), ElementsAre("missing_member"));
  EXPECT_THAT(v.findings[0].evidence, HasSubstr("member 1"));
}

TEST_P(Fault, DoubleCountedMember) {
  candidate = synthetic_step({.member_weight = {{0, 2.0}}});
  disturb_all_but_output_matrix();
  EXPECT_THAT(verdict().names(), ElementsAre("double_counted_member"));
}

TEST_P(Fault, DoubleCountedBoundaryToken) {
  candidate = synthetic_step({.first_weight = 2});
  disturb_all_but_output_matrix();
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("double_counted_boundary_token"));
}

TEST_P(Fault, MissingBoundaryToken) {
  candidate = synthetic_step({.first_weight = 0});
  disturb_all_but_output_matrix();
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("missing_boundary_token"));
}

TEST_P(Fault, BoundaryTokenWithATiedOutputMatrix) {
  for (const double weight : {0.0, 2.0}) {
    reference = synthetic_step({.tied = true});
    candidate = synthetic_step({.tied = true, .first_weight = weight});
    disturb_all_but_output_matrix();
    EXPECT_THAT(verdict().names(), ElementsAre(weight == 0 ? "missing_boundary_token" : "double_counted_boundary_token"));
  }
}

TEST_P(Fault, DetachedPromptWithATiedOutputMatrix) {
  reference = synthetic_step({.tied = true});
  candidate = reference;
  for (const auto& [name, part] : reference.prompt_part) {
    for (std::size_t i = 0; i < part.values.size(); ++i) gradient(name).values[i] -= part.values[i];
  }
  EXPECT_THAT(verdict().names(), ElementsAre("detached_prompt"));
}

TEST_P(Fault, FirstResponseTokenLeftOutOfTheLogprobs) {
  disturb_all_but_output_matrix();
  for (auto& r : candidate.responses) {
    r.policy_logprobs->erase(r.policy_logprobs->begin());
    r.policy_logprobs->push_back(-9);
  }
  EXPECT_THAT(verdict().names(), ElementsAre("missing_boundary_token"));
}

TEST_P(Fault, WrongLogprobOfTheFirstResponseToken) {
  disturb_all_but_output_matrix();
  for (auto& r : candidate.responses) r.policy_logprobs->front() -= 2.5;
  EXPECT_THAT(verdict().names(), ElementsAre("wrong_boundary_token"));
}

TEST_P(Fault, AnotherForwardPass) {
  disturb_all_but_output_matrix();
  for (auto& r : candidate.responses) {
    for (double& v : *r.policy_logprobs) v -= 0.8;
  }
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("different_forward"));
}

TEST_P(Fault, AnotherGradientAltogetherIsUnexplained) {
  candidate = synthetic_step({.seed = 5});
  candidate.responses = reference.responses;
  const auto v = verdict();
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("unexplained"));
}

TEST_P(Fault, GradientOfTheStepBefore) {
  const auto second = synthetic_step({.seed = 2});
  auto stale = second;
  stale.gradients = reference.gradients;
  const auto v = compare({reference, second}, {reference, stale}, GetParam());
  EXPECT_FALSE(v.pass);
  EXPECT_THAT(v.names(), ElementsAre("stale_gradient"));
}

TEST_P(Fault, GradientNotClearedBetweenSteps) {
  const auto second = synthetic_step({.seed = 2});
  auto sum = second;
  for (auto& [name, g] : sum.gradients) {
    for (std::size_t i = 0; i < g.values.size(); ++i) g.values[i] += reference.gradients.at(name).values[i];
  }
  EXPECT_THAT(compare({reference, second}, {reference, sum}, GetParam()).names(), ElementsAre("gradient_not_cleared"));
}

TEST_P(Fault, MissingConvolutionAdjoint) {
  reference = synthetic_step({.biases = false, .recurrent = true});
  candidate = reference;
  // The window's gradient feeds the projection of the last prompt tokens, the norm before it, and all that lies below.
  for (const auto& [name, part] : reference.prompt_part) {
    const bool last_recurrent = name.find("layers.2.") != std::string::npos;
    const bool input = name.find("in_proj_qkvz") != std::string::npos || name.find("input_layernorm") != std::string::npos;
    const bool below = name.find("layers.0.") != std::string::npos || name.find("layers.1.") != std::string::npos;
    if (!below && !(last_recurrent && input)) continue;
    for (std::size_t i = 0; i < part.values.size(); ++i) gradient(name).values[i] -= 0.3 * part.values[i];
  }
  const auto v = verdict();
  EXPECT_THAT(v.names(), ElementsAre("missing_convolution_adjoint"));
  EXPECT_THAT(v.findings[0].evidence, HasSubstr("layer 2"));
}

TEST_P(Fault, DetachedRecurrentPrompt) {
  reference = synthetic_step({.biases = false, .recurrent = true});
  candidate = reference;
  for (const auto& [name, part] : reference.prompt_part) {
    for (std::size_t i = 0; i < part.values.size(); ++i) gradient(name).values[i] -= part.values[i];
  }
  EXPECT_THAT(verdict().names(), ElementsAre("detached_prompt"));
}

TEST_P(Fault, TwoFaultsAreBothNamed) {
  scale("model.norm.weight", 0);
  scale("model.layers.1.mlp.up_proj.weight", -1);
  EXPECT_THAT(verdict().names(), ElementsAre("zeroed_parameter", "wrong_sign"));
}

TEST(FaultOfOldWeights, SaysThatTheyAreTheRolloutsWeights) {
  const auto reference = synthetic_step();
  auto candidate = synthetic_step({.seed = 9});
  candidate.responses = reference.responses;
  for (auto& r : candidate.responses) r.policy_logprobs = r.old_logprobs;
  const auto v = compare({reference}, {candidate}, "float64");
  ASSERT_THAT(v.names(), ElementsAre("stale_weights"));
  EXPECT_THAT(v.findings[0].evidence, HasSubstr("those of the rollout's weights"));
}

}  // namespace
}  // namespace longstraw::compare
