#include "longstraw/grouped_experts.h"

#include "core/base/errors.h"
#include "tests/support/closeness.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <memory>

namespace longstraw {
namespace {

using core::model::Activation;
using core::model::ExpertWeights;
using core::model::Parameter;

constexpr double kRounding = 1e-12;  // float64, inputs of size 1, sums of at most a few hundred terms; absolute

double most_apart(const at::Tensor& got, const at::Tensor& wanted) {
  if (!got.sizes().equals(wanted.sizes()) || !got.isfinite().all().item<bool>()) return std::numeric_limits<double>::infinity();
  return got.numel() == 0 ? 0.0 : (got.to(at::kDouble) - wanted.to(at::kDouble)).abs().max().item<double>();
}

struct Shape {
  int64_t tokens = 1, experts = 1, chosen = 1, hidden = 4, inner = 3;
  bool gated = true, fused = false;
  Activation activation = Activation::kSilu;
  int64_t used = 0;  // experts that tokens choose from; 0: all
};

// Parameters, their accumulators, and a layer over them.
struct Layer {
  std::deque<Parameter> parameters;
  std::map<const Parameter*, at::Tensor> gradients;
  ExpertWeights experts;
  at::Tensor x_SD, chosen_Sk, weights_Sk, grad_SD;

  const Parameter* add(const std::vector<int64_t>& shape, at::ScalarType dtype) {
    parameters.push_back({.name = "p" + std::to_string(parameters.size())});
    parameters.back().value =
        (at::randn(shape, at::kDouble) / std::sqrt(static_cast<double>(shape.back()))).to(dtype).requires_grad_();
    return &parameters.back();
  }
  // Sums that are there already.
  void start_gradients(at::ScalarType wide) {
    for (const auto& p : parameters) gradients[&p] = at::randn(p.value.sizes(), at::kDouble).to(wide);
  }
  GradientOf gradient_of() {
    return [this](const Parameter& p) { return gradients.at(&p); };
  }
};

std::unique_ptr<Layer> draw_layer(const Shape& shape, at::ScalarType dtype = at::kDouble) {
  auto layer = std::make_unique<Layer>();
  const int64_t count = shape.experts, inner = shape.inner, hidden = shape.hidden;
  layer->experts.activation = shape.activation;
  if (shape.fused) {
    const Parameter* const up = layer->add({count, shape.gated ? 2 * inner : inner, hidden}, dtype);
    const Parameter* const down = layer->add({count, hidden, inner}, dtype);
    for (int64_t e = 0; e < count; ++e) {
      if (shape.gated) layer->experts.gate.push_back({up, e, 0, inner});
      layer->experts.up.push_back({up, e, shape.gated ? inner : 0, inner});
      layer->experts.down.push_back({down, e});
    }
  } else {
    for (int64_t e = 0; e < count; ++e) {
      if (shape.gated) layer->experts.gate.push_back({layer->add({inner, hidden}, dtype)});
      layer->experts.up.push_back({layer->add({inner, hidden}, dtype)});
      layer->experts.down.push_back({layer->add({hidden, inner}, dtype)});
    }
  }
  layer->x_SD = at::randn({shape.tokens, hidden}, at::kDouble).to(dtype);
  layer->grad_SD = at::randn({shape.tokens, hidden}, at::kDouble).to(dtype);
  const int64_t used = shape.used > 0 ? shape.used : count;
  layer->chosen_Sk = at::rand({shape.tokens, used}).argsort(int64_t{1}).slice(1, 0, shape.chosen).contiguous();
  layer->weights_Sk = at::randn({shape.tokens, shape.chosen}, at::kDouble).to(dtype);
  return layer;
}

struct Naive {
  at::Tensor out, x, weights;
  std::vector<at::Tensor> parameters;
};

// One token and one expert at a time, in the words of the definition, through autograd in float64.
Naive naive(const Layer& layer) {
  const auto leaf = [](const at::Tensor& t) { return t.detach().to(at::kDouble).requires_grad_(); };
  std::map<const Parameter*, at::Tensor> values;
  for (const auto& p : layer.parameters) values[&p] = leaf(p.value);
  const auto value = [&](const core::model::ExpertWeight& part) { return part.of(values.at(part.parameter)); };
  const auto act = [&](const at::Tensor& z) {
    return layer.experts.activation == Activation::kSilu ? z * at::sigmoid(z) : at::relu(z) * at::relu(z);
  };
  at::Tensor x = leaf(layer.x_SD), weights = leaf(layer.weights_Sk);
  std::vector<at::Tensor> rows;
  for (int64_t t = 0; t < x.size(0); ++t) {
    at::Tensor sum = at::zeros({x.size(1)}, at::kDouble);
    for (int64_t j = 0; j < weights.size(1); ++j) {
      const auto e = static_cast<size_t>(layer.chosen_Sk[t][j].item<int64_t>());
      at::Tensor inner = at::mv(value(layer.experts.up[e]), x[t]);
      inner = layer.experts.gate.empty() ? act(inner) : act(at::mv(value(layer.experts.gate[e]), x[t])) * inner;
      sum = sum + weights[t][j] * at::mv(value(layer.experts.down[e]), inner);
    }
    rows.push_back(sum);
  }
  const at::Tensor out = at::stack(rows);
  out.backward(layer.grad_SD.to(at::kDouble));
  Naive result{out.detach(), x.grad(), weights.grad(), {}};
  for (const auto& p : layer.parameters) {
    const at::Tensor grad = values.at(&p).grad();
    result.parameters.push_back(grad.defined() ? grad : at::zeros(p.value.sizes(), at::kDouble));
  }
  return result;
}

RC_GTEST_PROP(GroupedExperts, AreTheWeightedSumOfTheChosenExpertsAndItsGradient, ()) {
  at::manual_seed(*rc::gen::inRange(0, 100000));
  Shape shape{.tokens = *rc::gen::inRange<int64_t>(1, 12),
              .experts = *rc::gen::inRange<int64_t>(1, 9),
              .hidden = *rc::gen::inRange<int64_t>(1, 7),
              .inner = *rc::gen::inRange<int64_t>(1, 7),
              .gated = *rc::gen::arbitrary<bool>(),
              .fused = *rc::gen::arbitrary<bool>(),
              .activation = *rc::gen::elementOf(std::vector<Activation>{Activation::kSilu, Activation::kRelu2})};
  shape.used = *rc::gen::inRange<int64_t>(1, shape.experts + 1);
  shape.chosen = *rc::gen::inRange<int64_t>(1, shape.used + 1);  // up to all of them
  const auto layer = draw_layer(shape);
  const Naive wanted = naive(*layer);
  const bool keep = *rc::gen::arbitrary<bool>();
  const ExpertsForward forward = grouped_experts_forward(layer->x_SD, layer->chosen_Sk, layer->weights_Sk, layer->experts, keep);
  RC_ASSERT(most_apart(forward.out_SD, wanted.out) <= kRounding);
  RC_ASSERT(forward.saved.up_NI.defined() == keep);

  layer->start_gradients(at::kDouble);
  std::vector<at::Tensor> before;
  for (const auto& p : layer->parameters) before.push_back(layer->gradients.at(&p).clone());
  const auto grads = grouped_experts_backward(layer->grad_SD, forward.saved, layer->experts, layer->gradient_of());
  RC_ASSERT(most_apart(grads.x_SD, wanted.x) <= kRounding);
  RC_ASSERT(most_apart(grads.weights_Sk, wanted.weights) <= kRounding);
  for (size_t i = 0; i < before.size(); ++i) {
    RC_ASSERT(most_apart(layer->gradients.at(&layer->parameters[i]), before[i] + wanted.parameters[i]) <= kRounding);
  }
}

TEST(GroupedExperts, AnExpertWithoutTokensIsLeftAlone) {
  at::manual_seed(1);
  const auto layer = draw_layer({.tokens = 10, .experts = 6, .chosen = 2, .used = 3});
  // Weights of the others that would spoil every sum they enter.
  for (size_t e = 3; e < 6; ++e) {
    at::NoGradGuard no_grad;
    for (const auto* part : {&layer->experts.gate[e], &layer->experts.up[e], &layer->experts.down[e]}) {
      part->parameter->value.detach().fill_(std::numeric_limits<double>::quiet_NaN());
    }
  }
  const auto forward = grouped_experts_forward(layer->x_SD, layer->chosen_Sk, layer->weights_Sk, layer->experts, true);
  EXPECT_TRUE(forward.out_SD.isfinite().all().item<bool>());
  layer->start_gradients(at::kDouble);
  const auto& untouched = layer->gradients.at(layer->experts.up[4].parameter);
  const at::Tensor before = untouched.clone();
  grouped_experts_backward(layer->grad_SD, forward.saved, layer->experts, layer->gradient_of());
  EXPECT_TRUE(at::equal(untouched, before));
}

// Several dtypes of the weights of the sum: a router may keep them wide.
struct Dtypes {
  at::ScalarType x, weights;
};
class GroupedExpertsIn : public testing::TestWithParam<Dtypes> {};

const Shape kLarge{.tokens = 96, .experts = 8, .chosen = 3, .hidden = 64, .inner = 48, .fused = true};

// Against float64 on the same rounded inputs. A value passes through at most n = 2 D + 3 I + k + S dependent roundings of
// size u, half an epsilon, which leave 4 u sqrt(n) (tests/support/closeness.h says where the 4 comes from). In bfloat16 sums
// are made in float32, so that only roundings of whole tensors count, each at most u and u/2 on average: on the longest way
// (to a gate's gradient) gate, up, silu, their product, e, weight · e, times up, times silu', and the result: 9.
TEST_P(GroupedExpertsIn, NarrowDtypesAreRoundedFloat64) {
  at::manual_seed(2);
  const auto layer = draw_layer(kLarge, GetParam().x);
  layer->weights_Sk = layer->weights_Sk.to(GetParam().weights);
  const bool half = GetParam().x == at::kBFloat16;
  const double u = (half ? std::ldexp(1.0, -7) : std::numeric_limits<float>::epsilon()) / 2;
  const double bound = half ? u / 2 * std::sqrt(9.0) : 4 * u * std::sqrt(2 * 64 + 3 * 48 + 3 + 96);
  const Naive wanted = naive(*layer);
  for (const auto& p : layer->parameters) layer->gradients[&p] = at::zeros(p.value.sizes(), at::kFloat);
  const auto forward = grouped_experts_forward(layer->x_SD, layer->chosen_Sk, layer->weights_Sk, layer->experts, false);
  const auto grads = grouped_experts_backward(layer->grad_SD, forward.saved, layer->experts, layer->gradient_of());
  EXPECT_EQ(forward.out_SD.scalar_type(), GetParam().x);
  EXPECT_EQ(grads.x_SD.scalar_type(), GetParam().x);
  EXPECT_EQ(grads.weights_Sk.scalar_type(), GetParam().weights);
  EXPECT_LE(test::relative_l2(forward.out_SD, wanted.out), bound);
  EXPECT_LE(test::relative_l2(grads.x_SD, wanted.x), bound);
  EXPECT_LE(test::relative_l2(grads.weights_Sk, wanted.weights), bound);
  for (size_t i = 0; i < layer->parameters.size(); ++i) {
    EXPECT_LE(test::relative_l2(layer->gradients.at(&layer->parameters[i]), wanted.parameters[i]), bound) << i;
  }
}

TEST_P(GroupedExpertsIn, TheSameBitsAgainAndWithoutKeptProducts) {
  at::manual_seed(3);
  const auto layer = draw_layer(kLarge, GetParam().x);
  layer->weights_Sk = layer->weights_Sk.to(GetParam().weights);
  const auto run = [&](bool keep) {
    for (const auto& p : layer->parameters) layer->gradients[&p] = at::zeros(p.value.sizes(), at::kFloat);
    const auto forward = grouped_experts_forward(layer->x_SD, layer->chosen_Sk, layer->weights_Sk, layer->experts, keep);
    const auto grads = grouped_experts_backward(layer->grad_SD, forward.saved, layer->experts, layer->gradient_of());
    std::vector<at::Tensor> all{forward.out_SD, grads.x_SD, grads.weights_Sk};
    for (const auto& p : layer->parameters) all.push_back(layer->gradients.at(&p));
    return all;
  };
  const auto first = run(true), second = run(true), again = run(false);
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(at::equal(first[i], second[i])) << i;
    EXPECT_TRUE(at::equal(first[i], again[i])) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, GroupedExpertsIn,
                         testing::Values(Dtypes{at::kFloat, at::kFloat}, Dtypes{at::kBFloat16, at::kBFloat16},
                                         Dtypes{at::kBFloat16, at::kFloat}),
                         [](const auto& info) {
                           return std::string(c10::toString(info.param.x)) + "With" + c10::toString(info.param.weights);
                         });

TEST(GroupedExperts, AParameterThatWantsNoGradientGetsNone) {
  at::manual_seed(4);
  const auto layer = draw_layer({.tokens = 5, .experts = 3, .chosen = 2});
  const Naive wanted = naive(*layer);
  const auto forward = grouped_experts_forward(layer->x_SD, layer->chosen_Sk, layer->weights_Sk, layer->experts, true);
  const auto grads =
      grouped_experts_backward(layer->grad_SD, forward.saved, layer->experts, [](const Parameter&) { return at::Tensor(); });
  EXPECT_LE(most_apart(grads.x_SD, wanted.x), kRounding);
}

TEST(GroupedExperts, RefuseWhatDoesNotFitTogether) {
  at::manual_seed(5);
  const auto layer = draw_layer({.tokens = 5, .experts = 3, .chosen = 2});
  const auto run = [&](const at::Tensor& chosen, const at::Tensor& weights, const ExpertWeights& experts) {
    return grouped_experts_forward(layer->x_SD, chosen, weights, experts, true);
  };
  EXPECT_NO_THROW(run(layer->chosen_Sk, layer->weights_Sk, layer->experts));
  EXPECT_THROW(run(layer->chosen_Sk + 2, layer->weights_Sk, layer->experts), ConfigError);
  EXPECT_THROW(run(layer->chosen_Sk - 1, layer->weights_Sk, layer->experts), ConfigError);
  EXPECT_THROW(run(layer->chosen_Sk.slice(1, 1), layer->weights_Sk, layer->experts), ConfigError);
  EXPECT_THROW(run(layer->chosen_Sk.to(at::kInt), layer->weights_Sk, layer->experts), ConfigError);
  ExpertWeights fewer = layer->experts;
  fewer.down.pop_back();
  EXPECT_THROW(run(layer->chosen_Sk, layer->weights_Sk, fewer), ConfigError);
}

}  // namespace
}  // namespace longstraw
