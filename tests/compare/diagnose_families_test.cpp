// Faults of recurrent, latent, sparse and expert models are called by their names, and not by their neighbours'. The gradients are
// made up from the mathematics of each state: which parameter, and which of its rows, gets what through which adjoint.
// tests/python/test_planted_faults.py plants the same faults in real models.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "compare/report.h"
#include "core/record/writer.h"
#include "tests/compare/synthetic_run.h"
#include "tests/record/sample_record.h"

namespace longstraw::compare {
namespace {

using namespace testing;
using core::record::testing::TemporaryFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::int64_t kHidden = 12;

// A gradient that is a response part and, by adjoint, parts that come through the prompt's state.
struct Parts {
  std::vector<std::int64_t> shape;
  std::vector<double> response;
  std::map<std::string, std::vector<double>> through;
};

class Model {
 public:
  explicit Model(std::uint64_t seed) : generator_(seed) {}

  void add(const std::string& name, const std::vector<std::int64_t>& shape, const std::set<std::string>& adjoints) {
    Parts& p = parts_[name];
    p.shape = shape;
    p.response = numbers(shape, 0.5);
    for (const auto& adjoint : adjoints) p.through[adjoint] = numbers(shape, 1);
  }
  // Only rows [first, end) of `name`, of one range or two, get something through `adjoint`.
  void restrict_rows(const std::string& name, const std::string& adjoint,
                     const std::vector<std::pair<std::int64_t, std::int64_t>>& ranges) {
    Parts& p = parts_.at(name);
    const auto columns = static_cast<std::int64_t>(p.response.size()) / p.shape[0];
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(p.response.size()); ++i) {
      const std::int64_t row = i / columns;
      const bool kept = std::any_of(ranges.begin(), ranges.end(), [&](const auto& r) { return row >= r.first && row < r.second; });
      if (!kept) p.through.at(adjoint)[static_cast<std::size_t>(i)] = 0;
    }
  }
  SyntheticStep without(const std::set<std::string>& dropped) const {
    SyntheticStep step;
    for (const auto& [name, p] : parts_) {
      Gradient g{p.shape, p.response};
      for (const auto& [adjoint, values] : p.through) {
        if (dropped.contains(adjoint)) continue;
        for (std::size_t i = 0; i < values.size(); ++i) g.values[i] += values[i];
      }
      step.gradients[name] = std::move(g);
    }
    return step;
  }
  std::vector<double> numbers(const std::vector<std::int64_t>& shape, double scale) {
    std::int64_t elements = 1;
    for (const auto dim : shape) elements *= dim;
    std::vector<double> values(static_cast<std::size_t>(elements));
    for (double& v : values) v = scale * normal_(generator_);
    return values;
  }

 private:
  std::mt19937_64 generator_;
  std::normal_distribution<double> normal_;
  std::map<std::string, Parts> parts_;
};

// Below the last state everything gets something through each adjoint of the states above.
void add_common(Model& m, const std::string& layer, const std::set<std::string>& adjoints) {
  m.add(layer + "post_attention_layernorm.weight", {kHidden}, adjoints);
  m.add(layer + "mlp.up_proj.weight", {16, kHidden}, adjoints);
}

void add_ends(Model& m, const std::set<std::string>& adjoints) {
  m.add("model.embed_tokens.weight", {40, kHidden}, adjoints);
  m.add("model.norm.weight", {kHidden}, {});
  m.add("lm_head.weight", {40, kHidden}, {});
}

// z 8 | x 8 | B 4 | C 4 | dt 2: values 8, two heads, one group of state size 4.
Model mamba2() {
  Model m(1);
  const std::set<std::string> all{"window", "recurrent"};
  add_ends(m, all);
  for (std::int64_t l = 0; l < 3; ++l) {
    const bool last = l == 2;
    const std::string layer = fmt::format("backbone.layers.{}.", l), mixer = layer + "mixer.";
    const std::set<std::string> state = last ? std::set<std::string>{"recurrent"} : all;
    const std::set<std::string> reader = last ? std::set<std::string>{} : all;
    m.add(layer + "norm.weight", {kHidden}, all);
    m.add(mixer + "in_proj.weight", {26, kHidden}, all);
    m.add(mixer + "conv1d.weight", {16, 1, 4}, state);
    m.add(mixer + "conv1d.bias", {16}, state);
    m.add(mixer + "A_log", {2}, state);
    m.add(mixer + "dt_bias", {2}, state);
    m.add(mixer + "D", {2}, reader);
    m.add(mixer + "norm.weight", {8}, reader);
    m.add(mixer + "out_proj.weight", {kHidden, 8}, reader);
    if (!last) continue;
    // C reaches later tokens through the window alone, dt through the state alone, z not at all.
    m.restrict_rows(mixer + "in_proj.weight", "window", {{8, 24}});
    m.restrict_rows(mixer + "in_proj.weight", "recurrent", {{8, 20}, {24, 26}});
  }
  return m;
}

// One full-attention layer after two of the delta rule: 2 key heads of 3, 4 value heads of 2.
Model delta_hybrid(bool grouped) {
  Model m(2);
  const std::set<std::string> all{"window", "recurrent", "keys", "values"}, below{"window", "recurrent"};
  add_ends(m, all);
  for (std::int64_t l = 0; l < 2; ++l) {
    const bool last = l == 1;
    const std::string layer = fmt::format("model.layers.{}.", l), mixer = layer + "linear_attn.";
    // Of the last of them the attention above is reached through the residual stream of prompt tokens too.
    const std::set<std::string> attention{"keys", "values"};
    auto with = [&](std::set<std::string> own) {
      if (!last) return all;
      own.insert(attention.begin(), attention.end());
      return own;
    };
    m.add(layer + "input_layernorm.weight", {kHidden}, all);
    const std::string qkv = mixer + (grouped ? "in_proj_qkvz.weight" : "in_proj_qkv.weight");
    m.add(qkv, {grouped ? 28 : 20, kHidden}, all);
    if (!grouped) m.add(mixer + "in_proj_z.weight", {8, kHidden}, with({}));
    m.add(mixer + (grouped ? "in_proj_ba.weight" : "in_proj_b.weight"), {grouped ? 8 : 4, kHidden}, with({"recurrent"}));
    if (!grouped) m.add(mixer + "in_proj_a.weight", {4, kHidden}, with({"recurrent"}));
    m.add(mixer + "conv1d.weight", {20, 1, 4}, with({"recurrent"}));
    m.add(mixer + "A_log", {4}, with({"recurrent"}));
    m.add(mixer + "dt_bias", {4}, with({"recurrent"}));
    m.add(mixer + "norm.weight", {2}, with({}));
    m.add(mixer + "out_proj.weight", {kHidden, 8}, with({}));
    add_common(m, layer, with({}));
    if (last && !grouped) m.restrict_rows(qkv, "recurrent", {{6, 20}});  // not the queries
  }
  const std::string layer = "model.layers.2.";
  m.add(layer + "input_layernorm.weight", {kHidden}, {"keys", "values"});
  m.add(layer + "self_attn.q_proj.weight", {12, kHidden}, {});
  m.add(layer + "self_attn.k_proj.weight", {6, kHidden}, {"keys"});
  m.add(layer + "self_attn.v_proj.weight", {6, kHidden}, {"values"});
  m.add(layer + "self_attn.o_proj.weight", {kHidden, 12}, {});
  add_common(m, layer, {});
  return m;
}

// Latent attention of latent size 5 and rotary key size 2; experts but in the first layer.
Model latent_experts() {
  Model m(3);
  const std::set<std::string> all{"latent", "rotary"};
  add_ends(m, all);
  for (std::int64_t l = 0; l < 3; ++l) {
    const bool last = l == 2;
    const std::string layer = fmt::format("model.layers.{}.", l), attention = layer + "self_attn.";
    const std::set<std::string> reader = last ? std::set<std::string>{} : all;
    std::set<std::string> expansion = reader;
    expansion.insert("prompt positions");
    m.add(layer + "input_layernorm.weight", {kHidden}, all);
    m.add(attention + "q_a_proj.weight", {6, kHidden}, reader);
    m.add(attention + "q_b_proj.weight", {10, 6}, reader);
    m.add(attention + "kv_a_proj_with_mqa.weight", {7, kHidden}, all);
    m.add(attention + "kv_a_layernorm.weight", {5}, last ? std::set<std::string>{"latent"} : all);
    m.add(attention + "kv_b_proj.weight", {16, 5}, expansion);
    m.add(attention + "o_proj.weight", {kHidden, 8}, reader);
    m.add(attention + "indexer.wk.weight", {4, kHidden}, {});
    if (last) {
      m.restrict_rows(attention + "kv_a_proj_with_mqa.weight", "latent", {{0, 5}});
      m.restrict_rows(attention + "kv_a_proj_with_mqa.weight", "rotary", {{5, 7}});
    }
    add_common(m, layer, reader);
    if (l == 0) continue;
    m.add(layer + "mlp.gate.weight", {4, kHidden}, reader);
    m.add(layer + "mlp.shared_experts.up_proj.weight", {8, kHidden}, reader);
    for (std::int64_t e = 0; e < 4; ++e) {
      m.add(fmt::format("{}mlp.experts.{}.up_proj.weight", layer, e), {8, kHidden}, reader);
      m.add(fmt::format("{}mlp.experts.{}.down_proj.weight", layer, e), {kHidden, 8}, reader);
    }
  }
  return m;
}

SyntheticStep zero_indexers(SyntheticStep step) {
  for (auto& [name, g] : step.gradients) {
    if (name.find("indexer") != std::string::npos) std::fill(g.values.begin(), g.values.end(), 0.0);
  }
  return step;
}

double rounding(const std::string& dtype) { return dtype == "float64" ? 1e-14 : dtype == "float32" ? 1e-6 : 1e-2; }

class FamilyFault : public ::testing::TestWithParam<std::string> {
 protected:
  std::vector<Finding> findings(const SyntheticStep& reference, SyntheticStep candidate, const std::string& arm = "exact") {
    add_rounding(candidate, rounding(GetParam()), 5);
    const TemporaryFolder folder;
    const auto report =
        compare_records(write_run(folder.file("b.h5"), synthetic_header("reference", GetParam()), {reference}),
                        write_run(folder.file("a.h5"), synthetic_header(arm, GetParam()), {candidate}), std::nullopt, {});
    return report.steps.front().findings;
  }
  std::vector<std::string> names(const SyntheticStep& reference, const SyntheticStep& candidate, const std::string& arm = "exact") {
    std::vector<std::string> result;
    for (const auto& f : findings(reference, candidate, arm)) result.push_back(f.name);
    return result;
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, FamilyFault, ::testing::Values("float64", "float32", "bfloat16"),
                         [](const auto& i) { return i.param; });

TEST_P(FamilyFault, StateSpaceModel) {
  const Model m = mamba2();
  EXPECT_THAT(names(m.without({}), m.without({})), ElementsAre());
  EXPECT_THAT(names(m.without({}), m.without({"window"})), ElementsAre("missing_convolution_adjoint"));
  EXPECT_THAT(names(m.without({}), m.without({"recurrent"})), ElementsAre("dropped_recurrent_adjoint"));
  EXPECT_THAT(names(m.without({}), m.without({"window", "recurrent"})), ElementsAre("detached_prompt"));
  // A tail that is longer than the window loses just this, on purpose.
  EXPECT_THAT(names(m.without({}), m.without({"recurrent"}), "tail"), ElementsAre("detached_prompt"));
}

TEST_P(FamilyFault, DeltaRuleHybrid) {
  for (const bool grouped : {false, true}) {
    const Model m = delta_hybrid(grouped);
    EXPECT_THAT(names(m.without({}), m.without({"window"})), ElementsAre("missing_convolution_adjoint"));
    const auto recurrent = findings(m.without({}), m.without({"recurrent"}));
    ASSERT_EQ(recurrent.size(), 1u);
    EXPECT_EQ(recurrent[0].name, "dropped_recurrent_adjoint");
    if (!grouped) {
      EXPECT_THAT(recurrent[0].evidence, HasSubstr("that of the convolution's window does: ")) << recurrent[0].evidence;
    }
    const auto both = findings(m.without({}), m.without({"window", "recurrent"}));
    ASSERT_EQ(both.size(), 1u);
    EXPECT_EQ(both[0].name, "dropped_recurrent_adjoint");
    EXPECT_THAT(both[0].evidence, HasSubstr("window does not either"));
    EXPECT_THAT(names(m.without({}), m.without({"window", "recurrent", "keys", "values"})), ElementsAre("detached_prompt"));
  }
}

TEST_P(FamilyFault, KeysOrValuesAlone) {
  const Model m = delta_hybrid(false);
  EXPECT_THAT(names(m.without({}), m.without({"keys"})), ElementsAre("dropped_key_adjoint"));
  EXPECT_THAT(names(m.without({}), m.without({"values"})), ElementsAre("dropped_value_adjoint"));
}

TEST_P(FamilyFault, LatentAttention) {
  const Model m = latent_experts();
  const auto reference = zero_indexers(m.without({}));
  const auto dropping = [&](const std::set<std::string>& what) { return zero_indexers(m.without(what)); };
  EXPECT_THAT(names(reference, dropping({"latent"})), ElementsAre("dropped_latent_adjoint"));
  EXPECT_THAT(names(reference, dropping({"rotary"})), ElementsAre("dropped_rotary_key_adjoint"));
  EXPECT_THAT(names(reference, dropping({"latent", "rotary"})), ElementsAre("detached_prompt"));
  const auto expansion = findings(reference, dropping({"prompt positions"}));
  ASSERT_EQ(expansion.size(), 1u);
  EXPECT_EQ(expansion[0].name, "missing_latent_expansion_gradient");
  EXPECT_THAT(expansion[0].evidence, HasSubstr("own gradient passes"));
  const auto cut = findings(dropping({"latent", "rotary"}), dropping({"latent", "rotary", "prompt positions"}), "detached");
  ASSERT_EQ(cut.size(), 1u);
  EXPECT_THAT(cut[0].evidence, HasSubstr("cut at the expanded keys and values"));
}

TEST_P(FamilyFault, GradientOfTheIndexer) {
  const Model m = latent_experts();
  EXPECT_THAT(names(zero_indexers(m.without({})), m.without({})), ElementsAre("gradient_of_indexer"));
}

TEST_P(FamilyFault, ExchangedExperts) {
  const Model m = latent_experts();
  const auto reference = zero_indexers(m.without({}));
  auto candidate = reference;
  for (const char* part : {"up_proj", "down_proj"}) {
    std::swap(candidate.gradients.at(fmt::format("model.layers.1.mlp.experts.0.{}.weight", part)).values,
              candidate.gradients.at(fmt::format("model.layers.1.mlp.experts.3.{}.weight", part)).values);
  }
  const auto found = findings(reference, candidate);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].name, "swapped_experts");
  EXPECT_THAT(found[0].evidence, HasSubstr("layer 1: experts 0 and 3 have each other's gradients in 4 parameters"));
}

TEST_P(FamilyFault, SharedExpertWithoutItsGate) {
  Model m(4);
  add_ends(m, {});
  m.add("model.layers.0.mlp.shared_expert_gate.weight", {1, kHidden}, {});
  m.add("model.layers.0.mlp.shared_expert.up_proj.weight", {8, kHidden}, {});
  auto candidate = m.without({});
  auto& gate = candidate.gradients.at("model.layers.0.mlp.shared_expert_gate.weight").values;
  std::fill(gate.begin(), gate.end(), 0.0);
  EXPECT_THAT(names(m.without({}), candidate), ElementsAre("missing_shared_expert_gate"));
}

// Below the last state everything moves by `common`, routed experts by `routed`; the state's weights keep their length.
SyntheticStep recomputed(const SyntheticStep& reference, double common, double routed) {
  auto step = reference;
  Model other(9);
  for (auto& [name, g] : step.gradients) {
    const bool last = name.find("layers.2.") != std::string::npos;
    const bool state = name.find("kv_a") != std::string::npos || name.find("input_layernorm") != std::string::npos;
    const bool outside = name == "model.norm.weight" || name == "lm_head.weight";
    if (outside || (last && !state) || name.find("indexer") != std::string::npos) continue;
    const bool is_expert = name.find("mlp.experts.") != std::string::npos || name.find("mlp.gate.") != std::string::npos;
    const auto noise = other.numbers(g.shape, is_expert ? routed : common);
    for (std::size_t i = 0; i < noise.size(); ++i) g.values[i] += noise[i];
  }
  return step;
}

TEST_P(FamilyFault, OtherRoutesAtRecompute) {
  const auto reference = zero_indexers(latent_experts().without({}));
  EXPECT_THAT(names(reference, recomputed(reference, 0.2, 0.6)), ElementsAre("stale_route_at_recompute"));
  EXPECT_THAT(names(reference, recomputed(reference, 0.4, 0.4)), ElementsAre("changed_recompute"));
}

TEST(ChangedChoices, ARunThatCountsChangedChoicesIsBelieved) {
  const auto reference = zero_indexers(latent_experts().without({}));
  const auto candidate = recomputed(reference, 0.4, 0.4);
  const TemporaryFolder folder;
  core::record::RecordWriter writer(folder.file("a.h5"), synthetic_header("exact", "float64"), {.durable = false});
  auto step = writer.begin_step(0);
  for (const auto& [name, g] : candidate.gradients) step.gradient(name, g.shape, g.values.data());
  step.memory({{"peak_bytes", 1}});
  step.timing({{"total", 1}});
  step.checks({{"changed_choices", 2}});
  step.commit();
  writer.close();
  const auto report = compare_records(write_run(folder.file("b.h5"), synthetic_header("reference", "float64"), {reference}),
                                      folder.file("a.h5"), std::nullopt, {});
  ASSERT_EQ(report.steps.front().findings.size(), 1u);
  EXPECT_EQ(report.steps.front().findings[0].name, "stale_route_at_recompute");
  EXPECT_THAT(report.steps.front().findings[0].evidence, HasSubstr("counted 2 routers and indexers"));
}

// --- traces: a forward pass that parts from the reference's at a known operation

const std::vector<std::string> kPoints{"0000.embedding",
                                       "0001.keys",
                                       "0002.latent_attention",
                                       "0003.add",
                                       "0004.add",
                                       "0005.keys",
                                       "0006.latent_attention",
                                       "0007.add",
                                       "0008.experts",
                                       "0009.routing_weights",
                                       "0010.add",
                                       "0011.keys",
                                       "0012.latent_attention",
                                       "0013.linear",
                                       "0014.add",
                                       "0015.experts",
                                       "0016.routing_weights",
                                       "0017.add",
                                       "0018.rms_norm"};

std::string cause_from(const std::string& first_different, const std::string& dtype) {
  auto reference = zero_indexers(latent_experts().without({}));
  auto candidate = zero_indexers(latent_experts().without({"latent", "rotary"}));
  for (auto& [name, g] : candidate.gradients) {
    if (name.find("indexer") == std::string::npos) g.values[0] += 1;
  }
  reference.responses = synthetic_step().responses;
  candidate.responses = reference.responses;
  std::mt19937_64 generator(3);
  std::normal_distribution<double> normal;
  for (std::size_t i = 0; i < reference.responses.size(); ++i) {
    auto &b = reference.responses[i], &a = candidate.responses[i];
    for (const auto& point : kPoints) {
      for (std::size_t t = 0; t < b.tokens.size(); ++t) {
        const bool choice = point.find("keys") != std::string::npos || point.find("experts") != std::string::npos;
        const double value = normal(generator);
        b.trace[point].push_back(value);
        a.trace[point].push_back(value + (point >= first_different ? 0.7 * normal(generator) : 0) +
                                 (choice ? 0 : rounding(dtype) * normal(generator)));
      }
    }
    for (double& v : *a.policy_logprobs) v -= 0.9;
  }
  const TemporaryFolder folder;
  const auto report =
      compare_records(write_run(folder.file("b.h5"), synthetic_header("reference", dtype), {reference}),
                      write_run(folder.file("a.h5"), synthetic_header("exact", dtype), {candidate}), std::nullopt, {});
  return report.steps.front().findings.at(0).name;
}

TEST_P(FamilyFault, ATraceNamesTheOperation) {
  const auto cause = [](const std::string& point) { return cause_from(point, GetParam()); };
  EXPECT_EQ(cause("0000"), "stale_weights");
  EXPECT_EQ(cause("0001"), "wrong_key_selection");
  EXPECT_EQ(cause("0006"), "wrong_attention");
  EXPECT_EQ(cause("0007"), "wrong_sparse_attention");  // the block alone differs: its selection or what it reads
  EXPECT_EQ(cause("0008"), "wrong_routes");
  EXPECT_EQ(cause("0009"), "wrong_routing_weights");
  EXPECT_EQ(cause("0010"), "wrong_experts");
  EXPECT_EQ(cause("0004"), "wrong_mlp");
  EXPECT_EQ(cause("0013"), "wrong_sparse_attention");  // a projection of the block that has been added next
  EXPECT_EQ(cause("0018"), "wrong_final_norm");
  EXPECT_EQ(cause("9999"), "different_forward");  // the traces agree to the end
}

}  // namespace
}  // namespace longstraw::compare
