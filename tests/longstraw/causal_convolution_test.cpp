// The convolution piece by piece against its definition token by token.
#include "longstraw/causal_convolution.h"

#include "core/base/errors.h"
#include "tests/support/closeness.h"
#include "tests/support/fixture.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <torch/torch.h>

#include <limits>

namespace longstraw {
namespace {

using test::relative_l2;
const auto kDouble = at::TensorOptions(at::kDouble);
constexpr double kRounding = 1e-12;

struct Case {
  ConvolutionInput input;
  at::Tensor grad_out, grad_end_window;
};

Case random_case(int64_t N, int64_t T, int64_t C, int64_t K, const std::vector<int64_t>& lengths, int64_t windows, bool bias) {
  Case c;
  c.input.x_NTC = at::randn({N, T, C}, kDouble);
  c.input.weight_C1K = at::randn({C, 1, K}, kDouble);
  if (windows > 0) c.input.window_NCk = at::randn({windows, C, K - 1}, kDouble);
  if (bias) c.input.bias_C = at::randn({C}, kDouble);
  c.input.lengths = lengths;
  c.grad_out = at::randn({N, T, C}, kDouble);
  c.grad_end_window = at::randn({N, C, K - 1}, kDouble);
  return c;
}

struct Result {
  at::Tensor out, end_window;
  ConvolutionGradients grads;
};

std::vector<std::pair<const char*, at::Tensor>> parts(const Result& x) {
  return {
      {"out", x.out},        {"end window", x.end_window}, {"x", x.grads.x}, {"window", x.grads.window}, {"weight", x.grads.weight},
      {"bias", x.grads.bias}};
}

Result naive(const Case& c) {
  const auto leaf = [](const at::Tensor& x) { return x.defined() ? x.detach().clone().requires_grad_() : x; };
  const ConvolutionInput& in = c.input;
  const at::Tensor x = leaf(in.x_NTC), window = leaf(in.window_NCk), weight = leaf(in.weight_C1K), bias = leaf(in.bias_C);
  const int64_t N = x.size(0), T = x.size(1), C = x.size(2), K = weight.size(2);
  std::vector<at::Tensor> outs, ends;
  for (int64_t n = 0; n < N; ++n) {
    std::vector<at::Tensor> past;  // columns, oldest first
    for (int64_t j = 0; j + 1 < K; ++j) {
      past.push_back(window.defined() ? window[window.size(0) == 1 ? 0 : n].select(1, j) : at::zeros({C}, x.options()));
    }
    std::vector<at::Tensor> rows;
    for (int64_t t = 0; t < T; ++t) {
      if (!in.lengths.empty() && t >= in.lengths[size_t(n)]) {
        rows.push_back(at::zeros({C}, x.options()));
        continue;
      }
      past.push_back(x[n][t]);
      at::Tensor sum = bias.defined() ? bias.to(x.scalar_type()) : at::zeros({C}, x.options());
      for (int64_t j = 0; j < K; ++j) sum = sum + weight.select(1, 0).select(1, j) * past[past.size() - size_t(K) + size_t(j)];
      rows.push_back(sum * at::sigmoid(sum));
    }
    outs.push_back(at::stack(rows));
    ends.push_back(K == 1 ? at::zeros({C, 0}, x.options())
                          : at::stack(std::vector<at::Tensor>(past.end() - (K - 1), past.end()), 1));
  }
  const at::Tensor out = at::stack(outs), end = at::stack(ends);
  at::Tensor loss = at::zeros({}, x.options());
  if (c.grad_out.defined()) loss = loss + (out * c.grad_out).sum();
  if (c.grad_end_window.defined()) loss = loss + (end * c.grad_end_window).sum();
  if (loss.requires_grad()) loss.backward();
  const auto grad = [](const at::Tensor& t) { return !t.defined() ? t : t.grad().defined() ? t.grad() : at::zeros_like(t); };
  return {out.detach(), end.detach(), {grad(x), grad(window), grad(weight), grad(bias)}};
}

Result ours(const Case& c) {
  const ConvolutionOutput out = causal_convolution_forward(c.input);
  return {out.out_NTC, out.end_window_NCk, causal_convolution_backward(c.input, c.grad_out, c.grad_end_window)};
}

double worst_error(const Result& got, const Result& wanted) {
  double worst = 0.0;
  const auto a = parts(got), b = parts(wanted);
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].second.defined() != b[i].second.defined()) return std::numeric_limits<double>::infinity();
    if (a[i].second.defined()) worst = std::max(worst, relative_l2(a[i].second, b[i].second));
  }
  return worst;
}

RC_GTEST_PROP(CausalConvolution, PiecesAreTheDefinition, ()) {
  const auto size = [](std::vector<int64_t> of) { return *rc::gen::elementOf(of); };
  const int64_t N = size({1, 2, 4}), T = size({1, 2, 3, 4, 20, 65}), C = size({1, 3, 600}), K = size({1, 2, 4});
  std::vector<int64_t> lengths;
  if (*rc::gen::arbitrary<bool>())
    lengths = *rc::gen::container<std::vector<int64_t>>(size_t(N), rc::gen::inRange<int64_t>(0, T + 1));
  at::manual_seed(*rc::gen::inRange(0, 1000));
  Case c = random_case(N, T, C, K, lengths, size({0, 1, N}), *rc::gen::arbitrary<bool>());
  if (*rc::gen::inRange(0, 4) == 0) c.grad_out.reset();
  if (*rc::gen::inRange(0, 4) == 0) c.grad_end_window.reset();
  RC_ASSERT(worst_error(ours(c), naive(c)) <= kRounding);
}

// What transformers' own code gives (fixtures/make_recurrence_golden.py).
TEST(CausalConvolution, GoldenValuesOfTransformers) {
  const auto golden = test::read_tensors("fixtures/recurrence/causal_convolution.safetensors");
  Case c;
  c.input = {golden.at("x"), golden.at("window"), golden.at("weight"), golden.at("bias"), {}};
  c.grad_out = golden.at("grad_out");
  c.grad_end_window = golden.at("grad_end");
  const Result wanted{golden.at("out"),
                      golden.at("end"),
                      {golden.at("grad.x"), golden.at("grad.window"), golden.at("grad.weight"), golden.at("grad.bias")}};
  EXPECT_LE(worst_error(ours(c), wanted), kRounding);
}

// More tokens than one piece holds, more channels than one range, several threads.
TEST(CausalConvolution, ManyPiecesAreTheDefinition) {
  at::manual_seed(1);
  const Case c = random_case(2, 150, 1300, 4, {150, 97}, 2, true);
  EXPECT_LE(worst_error(ours(c), naive(c)), kRounding);
  const Result first = ours(c), second = ours(c);
  for (size_t i = 0; i < parts(first).size(); ++i) EXPECT_TRUE(at::equal(parts(first)[i].second, parts(second)[i].second));
}

// A sequence shorter than the window hands on part of the window that it was given.
TEST(CausalConvolution, AShortSequenceKeepsTheEndOfItsWindow) {
  at::manual_seed(2);
  const Case c = random_case(3, 2, 5, 4, {0, 1, 2}, 3, false);
  const ConvolutionOutput out = causal_convolution_forward(c.input);
  EXPECT_TRUE(at::equal(out.end_window_NCk[0], c.input.window_NCk[0]));
  EXPECT_TRUE(at::equal(out.end_window_NCk[1].slice(1, 0, 2), c.input.window_NCk[1].slice(1, 1, 3)));
  EXPECT_TRUE(at::equal(out.end_window_NCk[1].select(1, 2), c.input.x_NTC[1][0]));
  EXPECT_TRUE(at::equal(out.end_window_NCk[2].select(1, 0), c.input.window_NCk[2].select(1, 2)));
}

TEST(CausalConvolution, WhatStandsBehindALengthChangesNothing) {
  at::manual_seed(3);
  Case c = random_case(2, 9, 4, 4, {9, 2}, 2, true);
  const Result before = ours(c);
  c.input.x_NTC[1].slice(0, 2).fill_(1e30);
  c.grad_out[1].slice(0, 2).fill_(-1e30);
  const auto was = parts(before), is = parts(ours(c));
  for (size_t i = 0; i < was.size(); ++i) EXPECT_TRUE(at::equal(was[i].second, is[i].second)) << was[i].first;
  EXPECT_EQ(before.grads.x[1].slice(0, 2).abs().max().item<double>(), 0.0);
  EXPECT_EQ(before.out[1].slice(0, 2).abs().max().item<double>(), 0.0);
}

TEST(CausalConvolution, GradientsAreThoseOfFiniteDifferences) {
  at::manual_seed(4);
  Case c = random_case(2, 5, 3, 4, {5, 2}, 1, true);
  const auto loss = [&] {
    const ConvolutionOutput out = causal_convolution_forward(c.input);
    return ((out.out_NTC * c.grad_out).sum() + (out.end_window_NCk * c.grad_end_window).sum()).item<double>();
  };
  const Result got = ours(c);
  constexpr double kStep = 1e-5;  // central: error h² + eps / h, both near 1e-10
  for (const auto& [input, grad] : std::vector<std::pair<at::Tensor, at::Tensor>>{{c.input.x_NTC, got.grads.x},
                                                                                  {c.input.window_NCk, got.grads.window},
                                                                                  {c.input.weight_C1K, got.grads.weight},
                                                                                  {c.input.bias_C, got.grads.bias}}) {
    at::Tensor wanted = at::zeros_like(grad);
    for (int64_t i = 0; i < input.numel(); ++i) {
      at::Tensor x = input.view(-1)[i];
      const double was = x.item<double>();
      x.fill_(was + kStep);
      const double above = loss();
      x.fill_(was - kStep);
      wanted.view(-1)[i] = (above - loss()) / (2 * kStep);
      x.fill_(was);
    }
    EXPECT_LE(relative_l2(grad, wanted), 1e-8);
  }
}

Case cast(const Case& c, at::ScalarType dtype) {
  Case x = c;
  for (at::Tensor* t :
       {&x.input.x_NTC, &x.input.window_NCk, &x.input.weight_C1K, &x.input.bias_C, &x.grad_out, &x.grad_end_window}) {
    *t = t->to(dtype);
  }
  return x;
}

TEST(CausalConvolution, NarrowTypesAreNoWorseThanTheDefinitionInThem) {
  at::manual_seed(5);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const Case c = cast(random_case(2, 300, 20, 4, {300, 123}, 2, true), dtype);
    const auto exact = parts(naive(cast(c, at::kDouble))), plain = parts(naive(c)), got = parts(ours(c));
    for (size_t i = 0; i < exact.size(); ++i) {
      EXPECT_LE(relative_l2(got[i].second, exact[i].second), 1.1 * relative_l2(plain[i].second, exact[i].second))
          << exact[i].first << " in " << toString(dtype);
    }
  }
}

TEST(CausalConvolution, RefusesWhatDoesNotFit) {
  const Case good = random_case(2, 5, 3, 4, {}, 2, true);
  const auto broken = [&](auto change) {
    Case c = good;
    change(c.input);
    return c.input;
  };
  EXPECT_THROW(causal_convolution_forward(broken([](auto& in) { in.lengths = {5}; })), ConfigError);
  EXPECT_THROW(causal_convolution_forward(broken([](auto& in) { in.lengths = {5, 6}; })), ConfigError);
  EXPECT_THROW(causal_convolution_forward(broken([](auto& in) { in.weight_C1K = at::randn({4, 1, 4}, kDouble); })), ConfigError);
  EXPECT_THROW(causal_convolution_forward(broken([](auto& in) { in.window_NCk = at::randn({2, 3, 4}, kDouble); })), ConfigError);
  EXPECT_THROW(causal_convolution_backward(good.input, at::randn({2, 5, 4}, kDouble), {}), ConfigError);
}

}  // namespace
}  // namespace longstraw
