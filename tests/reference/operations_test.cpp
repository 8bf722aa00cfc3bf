// Each operation of the reference against the same equation in plain loops over doubles, and its gradient against finite
// differences. What a cut does to it, and the corners: ties, fewer keys than are asked for, sequences shorter than the
// convolution, keys of zero.
#include "reference/textbook.h"
#include "reference/whole_sequence.h"
#include "tests/support/closeness.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace longstraw {
namespace {

using core::model::ExpertWeights;
using core::model::Parameter;
using reference::Attention;
using reference::WholeSequence;

// Two ways to add the same few hundred numbers of order 1 in float64: some hundred roundings of 1e-16 each.
constexpr double kSameSum = 1e-13;

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(at::make_generator<at::CPUGeneratorImpl>(seed)) {}
  at::Tensor normal(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble) {
    return at::randn(shape, generator_, at::kDouble).to(dtype);
  }

 private:
  at::Generator generator_;
};

Parameter parameter(const at::Tensor& value) { return {"weight", value.sizes().vec(), true, value}; }
at::Tensor leaf(const at::Tensor& value) { return value.detach().clone().set_requires_grad(true); }

// One operation and the tensors it is differentiated by.
struct Case {
  std::string name;
  std::vector<at::Tensor> inputs;
  std::function<at::Tensor(WholeSequence&, const std::vector<at::Tensor>&)> run;
  std::vector<size_t> by_token = {};  // inputs whose first dimension is the sequence
  bool fixed_choices = false;         // experts or keys that were chosen for the whole sequence
};

constexpr int64_t kTokens = 9;

at::Tensor below_zero(const at::Tensor& x) { return -x.abs() - 0.05; }

std::vector<Case> cases() {
  Random random(11);
  std::vector<Case> all;
  all.push_back({"attention",
                 {random.normal({kTokens, 4, 3}), random.normal({kTokens, 2, 3}), random.normal({kTokens, 2, 3})},
                 [](WholeSequence& e, const auto& x) { return e.attention({.scale = 0.6}, x[0], x[1], x[2]); },
                 {0, 1, 2}});
  all.push_back({"windowed attention",
                 {random.normal({kTokens, 4, 3}), random.normal({kTokens, 2, 3}), random.normal({kTokens, 2, 3})},
                 [](WholeSequence& e, const auto& x) { return e.attention({.scale = 0.6, .window = 3}, x[0], x[1], x[2]); },
                 {0, 1, 2}});
  // H 3, plain 4, rotary 2, latent 5, value 3.
  const std::vector<at::Tensor> latent{random.normal({kTokens, 3, 4}), random.normal({kTokens, 3, 2}), random.normal({kTokens, 5}),
                                       random.normal({kTokens, 2}), random.normal({3 * (4 + 3), 5})};
  all.push_back(
      {"latent attention",
       latent,
       [](WholeSequence& e, const auto& x) { return e.latent_attention({.scale = 0.4}, x[0], x[1], x[2], x[3], parameter(x[4])); },
       {0, 1, 2, 3}});
  const at::Tensor query = random.normal({kTokens, 16, 4}), key = random.normal({kTokens, 4}),
                   weight = random.normal({kTokens, 16});
  all.push_back({"sparse latent attention",
                 latent,
                 [=](WholeSequence& e, const auto& x) {
                   e.select_keys({.top_k = 3}, query, key, weight);
                   return e.latent_attention({.scale = 0.4, .sparse = true}, x[0], x[1], x[2], x[3], parameter(x[4]));
                 },
                 {0, 1, 2, 3},
                 /*fixed_choices=*/true});
  all.push_back({"causal convolution",
                 {random.normal({kTokens, 5}), random.normal({5, 1, 4}), random.normal({5})},
                 [](WholeSequence& e, const auto& x) {
                   const Parameter weight_C1K = parameter(x[1]), bias_C = parameter(x[2]);
                   return e.causal_convolution(0, x[0], weight_C1K, &bias_C);
                 },
                 {0}});
  all.push_back({"gated delta rule",
                 {random.normal({kTokens, 2, 3}), random.normal({kTokens, 2, 3}), random.normal({kTokens, 4, 2}),
                  below_zero(random.normal({kTokens, 4})), at::sigmoid(random.normal({kTokens, 4}))},
                 [](WholeSequence& e, const auto& x) { return e.gated_delta_rule(0, x[0], x[1], x[2], x[3], x[4]); },
                 {0, 1, 2, 3, 4}});
  all.push_back({"state space",
                 {random.normal({kTokens, 4, 3}), random.normal({kTokens, 4}).abs(), below_zero(random.normal({4})),
                  random.normal({kTokens, 2, 5}), random.normal({kTokens, 2, 5})},
                 [](WholeSequence& e, const auto& x) { return e.state_space(0, x[0], x[1], x[2], x[3], x[4]); },
                 {0, 1, 3, 4}});
  const at::Tensor chosen = WholeSequence(Attention::kTextbook, 0).choose_experts(0, random.normal({kTokens, 4}), 2);
  all.push_back({"gated experts, one fused parameter",
                 {random.normal({kTokens, 5}), random.normal({kTokens, 2}), random.normal({4, 6, 5}), random.normal({4, 5, 3})},
                 [chosen](WholeSequence& e, const auto& x) {
                   const Parameter gate_up = parameter(x[2]), down = parameter(x[3]);
                   ExpertWeights experts;
                   for (int64_t expert = 0; expert < 4; ++expert) {
                     experts.gate.push_back({&gate_up, expert, 0, 3});
                     experts.up.push_back({&gate_up, expert, 3, 3});
                     experts.down.push_back({&down, expert});
                   }
                   return e.experts(x[0], chosen, x[1], experts);
                 },
                 {0, 1},
                 /*fixed_choices=*/true});
  all.push_back({"experts without a gate, parameters of their own",
                 {random.normal({kTokens, 5}), random.normal({kTokens, 2}), random.normal({3, 5}), random.normal({5, 3})},
                 [chosen](WholeSequence& e, const auto& x) {
                   const Parameter up = parameter(x[2]), down = parameter(x[3]);
                   ExpertWeights experts{.activation = core::model::Activation::kRelu2};
                   for (int expert = 0; expert < 4; ++expert) {
                     experts.up.push_back({&up});
                     experts.down.push_back({&down});
                   }
                   return e.experts(x[0], chosen, x[1], experts);
                 },
                 {0, 1},
                 /*fixed_choices=*/true});
  return all;
}

class ReferenceOperation : public testing::TestWithParam<size_t> {
 protected:
  const Case it_ = cases().at(GetParam());

  at::Tensor run(const std::vector<at::Tensor>& inputs, int64_t cut = 0, Attention attention = Attention::kTextbook) const {
    WholeSequence execution(attention, cut);
    return it_.run(execution, inputs);
  }
  // Gradients of a random weighting of the outputs of tokens `from` … S - 1.
  std::vector<at::Tensor> gradients(int64_t cut, int64_t from) const {
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& input : it_.inputs) leaves.push_back(leaf(input));
    return torch::autograd::grad({loss(run(leaves, cut), from)}, leaves);
  }
  static at::Tensor loss(const at::Tensor& out, int64_t from) {
    const at::Tensor weights = Random(5).normal(out.sizes());
    return (out * weights).slice(0, from).sum();
  }
};

TEST_P(ReferenceOperation, GradientIsTheSlopeInRandomDirections) {
  const auto gradient = gradients(0, 0);
  Random random(23);
  for (size_t i = 0; i < it_.inputs.size(); ++i) {
    SCOPED_TRACE(it_.name + ", input " + std::to_string(i));
    const at::Tensor drawn = random.normal(it_.inputs[i].sizes());
    const at::Tensor direction = drawn / drawn.norm();
    const auto loss_at = [&](double step) {
      std::vector<at::Tensor> moved = it_.inputs;
      moved[i] = moved[i] + step * direction;
      return loss(run(moved), 0).item<double>();
    };
    // Fourth order. Rounding of a loss of order 10 over a step of 1e-3: 1e-15 · 10 / 1e-3 = 1e-11; truncation 1e-12 · the
    // fifth derivative / 30, which for these functions of order 1 is below some thousands.
    const double step = 1e-3;
    const double slope = (8 * (loss_at(step) - loss_at(-step)) - (loss_at(2 * step) - loss_at(-2 * step))) / (12 * step);
    const double predicted = (direction * gradient[i]).sum().item<double>();
    EXPECT_LE(std::abs(slope - predicted), 1e-9 * std::max(1.0, gradient[i].norm().item<double>()));
    EXPECT_GT(gradient[i].norm().item<double>(), 1e-3) << "an input that nothing depends on";
  }
}

TEST_P(ReferenceOperation, ACutChangesNoValue) {
  const at::Tensor whole = run(it_.inputs);
  for (int64_t cut = 1; cut <= kTokens; ++cut) EXPECT_TRUE(at::equal(run(it_.inputs, cut), whole)) << it_.name << cut;
}

// Tokens from the cut on see what was before as constants: their own inputs' gradients are those of the whole graph, since
// the state before the cut does not depend on them, and inputs before the cut get none.
TEST_P(ReferenceOperation, ACutStopsTheGradientAtItsTokenAndNowhereElse) {
  for (int64_t cut = 1; cut < kTokens; ++cut) {
    const auto whole = gradients(0, cut), after = gradients(cut, cut);
    for (const size_t i : it_.by_token) {
      SCOPED_TRACE(it_.name + ", input " + std::to_string(i) + ", cut " + std::to_string(cut));
      EXPECT_EQ(after[i].slice(0, 0, cut).abs().max().item<double>(), 0.0);
      EXPECT_LE(test::relative_l2(after[i].slice(0, cut), whole[i].slice(0, cut)), kSameSum);
    }
  }
}

TEST_P(ReferenceOperation, ASequenceIsTheBeginningOfALongerOne) {
  if (it_.fixed_choices) GTEST_SKIP() << "chosen for the whole sequence";
  const at::Tensor whole = run(it_.inputs);
  for (int64_t tokens = 1; tokens < kTokens; ++tokens) {
    std::vector<at::Tensor> shorter = it_.inputs;
    for (const size_t i : it_.by_token) shorter[i] = shorter[i].slice(0, 0, tokens);
    EXPECT_LE(test::relative_l2(run(shorter), whole.slice(0, 0, tokens)), kSameSum) << it_.name << ", " << tokens << " tokens";
  }
}

TEST_P(ReferenceOperation, ScaledDotProductAttentionIsTheSame) {
  if (it_.name.find("attention") == std::string::npos) GTEST_SKIP() << "does not attend";
  EXPECT_LE(test::relative_l2(run(it_.inputs, 0, Attention::kSdpa), run(it_.inputs)), kSameSum) << it_.name;
}

INSTANTIATE_TEST_SUITE_P(Operations, ReferenceOperation, testing::Range(size_t(0), cases().size()), [](const auto& info) {
  std::string name = cases()[info.param].name;
  std::erase_if(name, [](char c) { return !isalnum(c); });
  return name;
});

// ---------------------------------------------------------------------------------------------- the equations, in loops

double at2(const at::Tensor& x, int64_t i, int64_t j) { return x[i][j].item<double>(); }
double at3(const at::Tensor& x, int64_t i, int64_t j, int64_t k) { return x[i][j][k].item<double>(); }

double silu(double x) { return x / (1 + std::exp(-x)); }

at::Tensor delta_rule_in_loops(const std::vector<at::Tensor>& x) {
  const int64_t heads = x[2].size(1), d = x[1].size(2), v = x[2].size(2), repeats = heads / x[1].size(1);
  at::Tensor out = at::zeros_like(x[2]);
  for (int64_t h = 0; h < heads; ++h) {
    const auto unit = [&](const at::Tensor& rows, int64_t t) {
      std::vector<double> row(size_t(d), 0.0);
      double square = 1e-6;
      for (int64_t i = 0; i < d; ++i) square += std::pow(row[size_t(i)] = at3(rows, t, h / repeats, i), 2);
      for (double& value : row) value /= std::sqrt(square);
      return row;
    };
    std::vector<std::vector<double>> state(size_t(d), std::vector<double>(size_t(v), 0.0));
    for (int64_t t = 0; t < x[2].size(0); ++t) {
      const auto q = unit(x[0], t), k = unit(x[1], t);
      for (auto& row : state) {
        for (double& s : row) s *= std::exp(at2(x[3], t, h));
      }
      for (int64_t j = 0; j < v; ++j) {
        double known = 0.0, read = 0.0;
        for (size_t i = 0; i < size_t(d); ++i) known += state[i][size_t(j)] * k[i];
        const double update = at2(x[4], t, h) * (at3(x[2], t, h, j) - known);
        for (size_t i = 0; i < size_t(d); ++i) read += (state[i][size_t(j)] += k[i] * update) * q[i];
        out[t][h][j] = read / std::sqrt(double(d));
      }
    }
  }
  return out;
}

at::Tensor state_space_in_loops(const std::vector<at::Tensor>& x) {
  const int64_t heads = x[0].size(1), p = x[0].size(2), n = x[3].size(2), repeats = heads / x[3].size(1);
  at::Tensor out = at::zeros_like(x[0]);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < p; ++i) {
      std::vector<double> state(size_t(n), 0.0);
      for (int64_t t = 0; t < x[0].size(0); ++t) {
        const double dt = at2(x[1], t, h);
        double read = 0.0;
        for (int64_t j = 0; j < n; ++j) {
          double& s = state[size_t(j)];
          s = std::exp(dt * x[2][h].item<double>()) * s + dt * at3(x[0], t, h, i) * at3(x[3], t, h / repeats, j);
          read += s * at3(x[4], t, h / repeats, j);
        }
        out[t][h][i] = read;
      }
    }
  }
  return out;
}

at::Tensor convolution_in_loops(const std::vector<at::Tensor>& x) {
  const int64_t taps = x[1].size(2);
  at::Tensor out = at::zeros_like(x[0]);
  for (int64_t t = 0; t < x[0].size(0); ++t) {
    for (int64_t c = 0; c < x[0].size(1); ++c) {
      double sum = x[2][c].item<double>();
      for (int64_t j = 0; j < taps; ++j) {
        if (const int64_t from = t - taps + 1 + j; from >= 0) sum += at3(x[1], c, 0, j) * at2(x[0], from, c);
      }
      out[t][c] = silu(sum);
    }
  }
  return out;
}

// In absorbed form, q W_K · c and W_V Σ p c: another order of the same products than the reference's.
at::Tensor absorbed_latent_attention(const std::vector<at::Tensor>& x, double scale) {
  const int64_t heads = x[0].size(1), plain = x[0].size(2);
  const at::Tensor kv_b = x[4].view({heads, -1, x[2].size(1)});
  at::Tensor out = at::zeros({kTokens, heads, kv_b.size(1) - plain}, at::kDouble);
  for (int64_t h = 0; h < heads; ++h) {
    const at::Tensor to_key = kv_b[h].slice(0, 0, plain), to_value = kv_b[h].slice(0, plain);
    for (int64_t t = 0; t < kTokens; ++t) {
      const at::Tensor latent = x[2].slice(0, 0, t + 1), rotary = x[3].slice(0, 0, t + 1);
      const at::Tensor score = latent.matmul(to_key.t().matmul(x[0][t][h])) + rotary.matmul(x[1][t][h]);
      const at::Tensor share = (score * scale).exp();
      out[t][h] = to_value.matmul((share / share.sum()).matmul(latent));
    }
  }
  return out;
}

// gate_up [E, 2 I, D] with silu, or up [E, I, D] with relu².
at::Tensor experts_in_loops(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights, const at::Tensor& in,
                            const at::Tensor& down) {
  const int64_t width = down.size(2);
  at::Tensor out = at::zeros_like(x);
  for (int64_t t = 0; t < x.size(0); ++t) {
    for (int64_t j = 0; j < chosen.size(1); ++j) {
      const int64_t e = chosen[t][j].item<int64_t>();
      const at::Tensor inner = in[e].matmul(x[t]), first = inner.slice(0, 0, width);
      const bool gated = in.size(1) == 2 * width;
      const at::Tensor active = gated ? first / (1 + (-first).exp()) * inner.slice(0, width) : first * first * (first > 0);
      out[t] += weights[t][j] * down[e].matmul(active);
    }
  }
  return out;
}

const Case& case_named(const std::vector<Case>& all, const std::string& name) {
  return *std::find_if(all.begin(), all.end(), [&](const Case& c) { return c.name == name; });
}

TEST(ReferenceOperations, AreTheirEquations) {
  const auto all = cases();
  const auto check = [&](const std::string& name, const std::function<at::Tensor(const std::vector<at::Tensor>&)>& loops) {
    const Case& one = case_named(all, name);
    WholeSequence execution(Attention::kTextbook, 0);
    EXPECT_LE(test::relative_l2(one.run(execution, one.inputs), loops(one.inputs)), kSameSum) << name;
  };
  check("gated delta rule", delta_rule_in_loops);
  check("state space", state_space_in_loops);
  check("causal convolution", convolution_in_loops);
  check("latent attention", [](const auto& x) { return absorbed_latent_attention(x, 0.4); });
}

TEST(ReferenceOperations, ExpertsAreTheWeightedSumOfTheChosen) {
  Random random(3);
  const at::Tensor x = random.normal({6, 5}), weights = random.normal({6, 2});
  const Parameter gate_up = parameter(random.normal({4, 6, 5})), down = parameter(random.normal({4, 5, 3}));
  ExpertWeights experts;
  for (int64_t e = 0; e < 4; ++e) {
    experts.gate.push_back({&gate_up, e, 0, 3});
    experts.up.push_back({&gate_up, e, 3, 3});
    experts.down.push_back({&down, e});
  }
  WholeSequence execution(Attention::kTextbook, 0);
  // Expert 2 has no token.
  const at::Tensor chosen = at::tensor({0, 1, 1, 0, 3, 1, 0, 3, 3, 0, 1, 3}, at::kLong).view({6, 2});
  EXPECT_LE(test::relative_l2(execution.experts(x, chosen, weights, experts),
                              experts_in_loops(x, chosen, weights, gate_up.value, down.value)),
            kSameSum);

  const Parameter up = parameter(random.normal({4, 3, 5}));
  ExpertWeights plain{.down = experts.down, .activation = core::model::Activation::kRelu2};
  for (int64_t e = 0; e < 4; ++e) plain.up.push_back({&up, e});
  EXPECT_LE(
      test::relative_l2(execution.experts(x, chosen, weights, plain), experts_in_loops(x, chosen, weights, up.value, down.value)),
      kSameSum);
}

TEST(ReferenceOperations, SparseAttentionWithoutASelectionIsAnError) {
  const auto all = cases();
  const auto& x = case_named(all, "latent attention").inputs;
  WholeSequence execution(Attention::kTextbook, 0);
  EXPECT_THROW(execution.latent_attention({.scale = 1.0, .sparse = true}, x[0], x[1], x[2], x[3], parameter(x[4])),
               std::logic_error);
}

// ------------------------------------------------------------------------------------------------------ precision

TEST(ReferenceOperations, KeysOfZeroHaveFiniteGradients) {
  Random random(2);
  const at::Tensor query = leaf(at::zeros({4, 1, 3})), key = leaf(at::zeros({4, 1, 3}));
  const at::Tensor value = leaf(random.normal({4, 2, 3})), decay = leaf(at::zeros({4, 2}, at::kDouble));
  const at::Tensor beta = leaf(at::ones({4, 2}, at::kDouble));
  WholeSequence execution(Attention::kTextbook, 0);
  const at::Tensor out = execution.gated_delta_rule(0, query.to(at::kDouble), key.to(at::kDouble), value, decay, beta);
  EXPECT_EQ(out.abs().max().item<double>(), 0.0);
  for (const at::Tensor& gradient : torch::autograd::grad({out.sum()}, {query, key, value, decay, beta})) {
    EXPECT_TRUE(at::isfinite(gradient).all().item<bool>());
  }
}

// The state of a recurrence is never in bfloat16: with a decay of almost 1 it would stop growing after 2^8 tokens.
TEST(ReferenceOperations, RecurrentStatesAreWideUnderBfloat16) {
  const int64_t tokens = 2048;
  WholeSequence execution(Attention::kTextbook, 0);
  const at::Tensor one = at::ones({tokens, 1, 1}, at::kBFloat16);
  const at::Tensor out =
      execution.state_space(0, one, at::ones({tokens, 1}, at::kFloat), at::full({1}, -1e-7, at::kFloat), one, one);
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  EXPECT_EQ(out[tokens - 1].item<double>(), 2048.0);

  // A value that is written once and read 2,048 tokens later through a decay that bfloat16 rounds to 1.
  at::Tensor value = at::zeros({tokens, 1, 1}, at::kBFloat16), beta = at::zeros({tokens, 1}, at::kFloat);
  value[0][0][0] = 1.0;
  beta[0][0] = 1.0;
  const at::Tensor read = execution.gated_delta_rule(0, one, one, value, at::full({tokens, 1}, -5e-4, at::kFloat), beta);
  EXPECT_EQ(read.scalar_type(), at::kBFloat16);
  EXPECT_NEAR(read[tokens - 1].item<double>(), std::exp(-5e-4 * double(tokens - 1)), std::ldexp(1.0, -8));
}

TEST(ReferenceOperations, Float64IsFloat64Throughout) {
  for (const Case& one : cases()) {
    std::vector<at::Tensor> rounded;
    for (const at::Tensor& input : one.inputs) rounded.push_back(input.to(at::kFloat).to(at::kDouble));
    WholeSequence execution(Attention::kTextbook, 0);
    const at::Tensor out = one.run(execution, rounded);
    EXPECT_EQ(out.scalar_type(), at::kDouble) << one.name;
    // Results that passed through float32 anywhere would be multiples of its spacing, or off by 1e-8.
    EXPECT_FALSE(at::equal(out, out.to(at::kFloat).to(at::kDouble))) << one.name;
  }
}

}  // namespace
}  // namespace longstraw
