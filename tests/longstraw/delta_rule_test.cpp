// The chunked delta rule against the recurrence token by token, written here in the words of its definition.
#include "longstraw/delta_rule.h"

#include "core/base/errors.h"
#include "tests/support/closeness.h"
#include "tests/support/fixture.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

namespace longstraw {
namespace {

using test::relative_l2;
const auto kDouble = at::TensorOptions(at::kDouble);

struct Shape {
  int64_t N = 1, T = 1, K = 1, r = 1, dk = 4, dv = 4;
};

struct Case {
  DeltaRuleInput input;
  at::Tensor grad_out, grad_end_state;
};

// Decays between e^{-least} and e^{-most}, β between 0 and 1 with one in four at 1 − 1e-6.
Case random_case(const Shape& s, const std::vector<int64_t>& lengths, int64_t states, double least = 0.0, double most = 0.5) {
  Case c;
  const int64_t H = s.K * s.r;
  c.input.query_NTKd = at::randn({s.N, s.T, s.K, s.dk}, kDouble);
  c.input.key_NTKd = at::randn({s.N, s.T, s.K, s.dk}, kDouble);
  c.input.value_NTHv = at::randn({s.N, s.T, H, s.dv}, kDouble);
  c.input.log_decay_NTH = -(least + (most - least) * at::rand({s.N, s.T, H}, kDouble));
  const at::Tensor beta = at::rand({s.N, s.T, H}, kDouble);
  c.input.beta_NTH = at::where(beta.lt(0.25), at::full_like(beta, 1.0 - 1e-6), beta);
  if (states > 0) c.input.state_NHkv = at::randn({states, H, s.dk, s.dv}, kDouble);
  c.input.lengths = lengths;
  c.grad_out = at::randn({s.N, s.T, H, s.dv}, kDouble);
  c.grad_end_state = at::randn({s.N, H, s.dk, s.dv}, kDouble);
  return c;
}

struct Result {
  at::Tensor out, end_state;
  DeltaRuleGradients grads;
};

// Every tensor of a result, to compare it with another.
std::vector<std::pair<const char*, at::Tensor>> parts(const Result& x) {
  return {{"out", x.out},           {"end state", x.end_state},       {"query", x.grads.query}, {"key", x.grads.key},
          {"value", x.grads.value}, {"log_decay", x.grads.log_decay}, {"beta", x.grads.beta},   {"state", x.grads.state}};
}

Result naive(const Case& c) {
  const auto leaf = [](const at::Tensor& x) { return x.defined() ? x.detach().clone().requires_grad_() : x; };
  const DeltaRuleInput& in = c.input;
  const auto wide = in.log_decay_NTH.scalar_type();
  const at::Tensor q = leaf(in.query_NTKd), k = leaf(in.key_NTKd), v = leaf(in.value_NTHv), g = leaf(in.log_decay_NTH),
                   b = leaf(in.beta_NTH), s0 = leaf(in.state_NHkv);
  const int64_t N = v.size(0), T = v.size(1), H = v.size(2), dk = k.size(3), repeat = H / k.size(2);
  std::vector<at::Tensor> outs, ends;
  for (int64_t n = 0; n < N; ++n) {
    at::Tensor state = s0.defined() ? s0[s0.size(0) == 1 ? 0 : n] : at::zeros({H, dk, v.size(3)}, g.options());
    const int64_t length = in.lengths.empty() ? T : in.lengths[size_t(n)];
    std::vector<at::Tensor> rows;
    for (int64_t t = 0; t < T; ++t) {
      if (t >= length) {
        rows.push_back(at::zeros_like(v[n][t]));
        continue;
      }
      const auto unit = [&](const at::Tensor& x) {
        const at::Tensor w = x[n][t].to(wide);
        return (w * at::rsqrt((w * w).sum(-1, true) + 1e-6)).repeat_interleave(repeat, 0);
      };
      const at::Tensor query = unit(q) * std::pow(double(dk), -0.5), key = unit(k);
      state = state * g[n][t].exp().view({H, 1, 1});
      const at::Tensor seen = (state * key.unsqueeze(-1)).sum(1);  // Sᵀ k
      state = state + key.unsqueeze(-1) * ((v[n][t].to(wide) - seen) * b[n][t].unsqueeze(-1)).unsqueeze(1);
      rows.push_back((state * query.unsqueeze(-1)).sum(1).to(v.scalar_type()));
    }
    outs.push_back(at::stack(rows));
    ends.push_back(state);
  }
  const at::Tensor out = at::stack(outs), end = at::stack(ends);
  at::Tensor loss = at::zeros({}, g.options());
  if (c.grad_out.defined()) loss = loss + (out.to(wide) * c.grad_out.to(wide)).sum();
  if (c.grad_end_state.defined()) loss = loss + (end * c.grad_end_state).sum();
  if (loss.requires_grad()) loss.backward();
  const auto grad = [](const at::Tensor& x) { return !x.defined() ? x : x.grad().defined() ? x.grad() : at::zeros_like(x); };
  return {out.detach(), end.detach(), {grad(q), grad(k), grad(v), grad(g), grad(b), grad(s0)}};
}

Result chunked(const Case& c, int64_t chunk = 64) {
  const DeltaRuleOutput out = delta_rule_forward(c.input, chunk);
  return {out.out_NTHv, out.end_state_NHkv, delta_rule_backward(c.input, out, c.grad_out, c.grad_end_state, chunk)};
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

constexpr double kRounding = 1e-12;

RC_GTEST_PROP(DeltaRule, ChunksAreTheRecurrence, ()) {
  const auto size = [](std::vector<int64_t> of) { return *rc::gen::elementOf(of); };
  const Shape s{.N = size({1, 2, 3, 5}),
                .T = size({1, 2, 3, 7, 20, 63, 64, 65, 130}),
                .K = size({1, 2, 3}),
                .r = size({1, 2, 3}),
                .dk = size({2, 4, 8}),
                .dv = size({1, 4, 16})};  // a key of size 1 is ±1: no gradient to compare
  std::vector<int64_t> lengths;
  if (*rc::gen::arbitrary<bool>())
    lengths = *rc::gen::container<std::vector<int64_t>>(size_t(s.N), rc::gen::inRange<int64_t>(0, s.T + 1));
  at::manual_seed(*rc::gen::inRange(0, 1000));
  Case c = random_case(s, lengths, size({0, 1, s.N}), 0.0, *rc::gen::elementOf(std::vector<double>{0.05, 0.5, 5.0}));
  if (*rc::gen::inRange(0, 4) == 0) c.grad_out.reset();
  if (*rc::gen::inRange(0, 4) == 0) c.grad_end_state.reset();
  const int64_t chunk = size({1, 5, 16, 64});
  RC_ASSERT(worst_error(chunked(c, chunk), naive(c)) <= kRounding);
}

// What transformers' own token-by-token rule gives (fixtures/make_recurrence_golden.py).
TEST(DeltaRule, GoldenValuesOfTransformers) {
  const auto golden = test::read_tensors("fixtures/recurrence/delta_rule.safetensors");
  Case c;
  c.input = {
      golden.at("query"), golden.at("key"), golden.at("value"), golden.at("log_decay"), golden.at("beta"), golden.at("state"), {}};
  c.grad_out = golden.at("grad_out");
  c.grad_end_state = golden.at("grad_end");
  const Result wanted{golden.at("out"),
                      golden.at("end"),
                      {golden.at("grad.query"), golden.at("grad.key"), golden.at("grad.value"), golden.at("grad.log_decay"),
                       golden.at("grad.beta"), golden.at("grad.state")}};
  for (const int64_t chunk : {7, 64}) EXPECT_LE(worst_error(chunked(c, chunk), wanted), kRounding);
}

TEST(DeltaRule, LongAndRaggedSequencesAreTheRecurrence) {
  at::manual_seed(1);
  const Case c = random_case({.N = 7, .T = 200, .K = 2, .r = 2, .dk = 8, .dv = 8}, {1, 3, 63, 64, 65, 200, 128}, 7);
  EXPECT_LE(worst_error(chunked(c), naive(c)), kRounding);
}

// Heads wide enough that every slice holds one group and a few chunks, which small tests never reach.
TEST(DeltaRule, WideHeadsAreTheRecurrence) {
  at::manual_seed(2);
  const Case c = random_case({.N = 1, .T = 140, .K = 2, .r = 3, .dk = 128, .dv = 128}, {}, 1);
  EXPECT_LE(worst_error(chunked(c), naive(c)), kRounding);
}

// e^{-50 t} underflows within a chunk, and its inverse would overflow.
TEST(DeltaRule, StrongDecayIsTheRecurrence) {
  at::manual_seed(3);
  const Shape s{.N = 2, .T = 130, .K = 2, .r = 2, .dk = 8, .dv = 8};
  Case c = random_case(s, {}, 2, 0.0, 50.0);
  EXPECT_LE(worst_error(chunked(c), naive(c)), kRounding);
  // Nearly none, and one in ten so strong that all before it is forgotten.
  c = random_case(s, {}, 2, 0.0, 1e-3);
  c.input.log_decay_NTH.masked_fill_(at::rand_like(c.input.log_decay_NTH).lt(0.1), -50.0);
  EXPECT_LE(worst_error(chunked(c), naive(c)), kRounding);
}

TEST(DeltaRule, GradientsAreThoseOfFiniteDifferences) {
  at::manual_seed(4);
  Case c = random_case({.N = 2, .T = 9, .K = 1, .r = 2, .dk = 3, .dv = 2}, {9, 5}, 1);
  const auto loss = [&] {
    const DeltaRuleOutput out = delta_rule_forward(c.input, 4);
    return ((out.out_NTHv * c.grad_out).sum() + (out.end_state_NHkv * c.grad_end_state).sum()).item<double>();
  };
  const Result got = chunked(c, 4);
  const std::vector<std::pair<at::Tensor, at::Tensor>> pairs{
      {c.input.query_NTKd, got.grads.query},        {c.input.key_NTKd, got.grads.key},  {c.input.value_NTHv, got.grads.value},
      {c.input.log_decay_NTH, got.grads.log_decay}, {c.input.beta_NTH, got.grads.beta}, {c.input.state_NHkv, got.grads.state}};
  constexpr double kStep = 1e-5;  // central: error h² + eps / h, both near 1e-10
  for (const auto& [input, grad] : pairs) {
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

TEST(DeltaRule, WhatStandsBehindALengthChangesNothing) {
  at::manual_seed(5);
  Case c = random_case({.N = 3, .T = 70, .K = 2, .r = 2, .dk = 4, .dv = 4}, {70, 65, 2}, 3);
  const Result before = chunked(c);
  for (at::Tensor* x :
       {&c.input.query_NTKd, &c.input.key_NTKd, &c.input.value_NTHv, &c.input.log_decay_NTH, &c.input.beta_NTH, &c.grad_out}) {
    (*x)[1].slice(0, 65).fill_(1e30);
    (*x)[2].slice(0, 2).fill_(-1e30);
  }
  const auto was = parts(before), is = parts(chunked(c));
  for (size_t i = 0; i < was.size(); ++i) EXPECT_TRUE(at::equal(was[i].second, is[i].second)) << was[i].first;
  EXPECT_EQ(before.grads.log_decay[2].slice(0, 2).abs().max().item<double>(), 0.0);
}

// The state at a cut, carried over with its adjoint, is the uncut sequence.
TEST(DeltaRule, ASequenceCutInTwoIsTheWhole) {
  at::manual_seed(6);
  const Case whole = random_case({.N = 2, .T = 100, .K = 2, .r = 1, .dk = 8, .dv = 4}, {}, 2);
  const Result wanted = chunked(whole);
  for (const int64_t cut : {1, 37, 64, 99}) {
    const auto piece = [&](int64_t begin, int64_t end) {
      Case c = whole;
      for (at::Tensor* x :
           {&c.input.query_NTKd, &c.input.key_NTKd, &c.input.value_NTHv, &c.input.log_decay_NTH, &c.input.beta_NTH, &c.grad_out}) {
        *x = x->slice(1, begin, end);
      }
      return c;
    };
    Case first = piece(0, cut), second = piece(cut, 100);
    second.input.state_NHkv = delta_rule_forward(first.input, 64, false).end_state_NHkv;
    const Result after = chunked(second);
    first.grad_end_state = after.grads.state;
    const Result before = chunked(first);
    EXPECT_LE(relative_l2(at::cat({before.out, after.out}, 1), wanted.out), kRounding);
    EXPECT_LE(relative_l2(after.end_state, wanted.end_state), kRounding);
    EXPECT_LE(relative_l2(before.grads.state, wanted.grads.state), kRounding);
    EXPECT_LE(relative_l2(at::cat({before.grads.key, after.grads.key}, 1), wanted.grads.key), kRounding);
    EXPECT_LE(relative_l2(at::cat({before.grads.log_decay, after.grads.log_decay}, 1), wanted.grads.log_decay), kRounding);
  }
}

Case cast(const Case& c, at::ScalarType narrow, at::ScalarType wide) {
  Case x = c;
  for (at::Tensor* t : {&x.input.query_NTKd, &x.input.key_NTKd, &x.input.value_NTHv, &x.grad_out}) *t = t->to(narrow);
  for (at::Tensor* t : {&x.input.log_decay_NTH, &x.input.beta_NTH, &x.input.state_NHkv, &x.grad_end_state}) *t = t->to(wide);
  return x;
}

// Each value passes through at most T chunk-to-chunk and in-chunk steps, each a dot product over the key size and the chunk:
// n dependent roundings leave u·sqrt(n) (Higham and Mary 2019); 4 for cancellation, 2 for the way back.
double float_bound(int64_t tokens, int64_t dk, int64_t chunk) {
  const double u = std::numeric_limits<float>::epsilon() / 2;
  return 4 * 2 * u * std::sqrt(double(tokens + dk + 2 * chunk));
}

TEST(DeltaRule, Float32IsWithinItsRounding) {
  at::manual_seed(7);
  for (const double decay : {0.05, 0.5, 50.0}) {
    const Case c =
        cast(random_case({.N = 2, .T = 200, .K = 2, .r = 2, .dk = 32, .dv = 16}, {200, 77}, 1, 0.0, decay), at::kFloat, at::kFloat);
    const Result wanted = naive(cast(c, at::kDouble, at::kDouble));
    EXPECT_LE(worst_error(chunked(c), wanted), float_bound(200, 32, 64)) << decay;
  }
}

TEST(DeltaRule, Bfloat16IsNoWorseThanTheRecurrenceInIt) {
  at::manual_seed(8);
  const Case c = cast(random_case({.N = 2, .T = 200, .K = 2, .r = 2, .dk = 32, .dv = 16}, {200, 77}, 2), at::kBFloat16, at::kFloat);
  const Result wanted = naive(cast(c, at::kDouble, at::kDouble));
  const auto exact = parts(wanted), plain = parts(naive(c)), ours = parts(chunked(c));
  for (size_t i = 0; i < exact.size(); ++i) {
    EXPECT_EQ(ours[i].second.scalar_type(), plain[i].second.scalar_type()) << exact[i].first;
    EXPECT_LE(relative_l2(ours[i].second, exact[i].second),
              1.1 * relative_l2(plain[i].second, exact[i].second) + float_bound(200, 32, 64))
        << exact[i].first;
  }
}

TEST(DeltaRule, TheSameInputGivesTheSameBits) {
  at::manual_seed(9);
  const Case c = cast(random_case({.N = 3, .T = 100, .K = 4, .r = 2, .dk = 64, .dv = 64}, {100, 80, 3}, 3), at::kFloat, at::kFloat);
  const auto first = parts(chunked(c)), second = parts(chunked(c));
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(first[i].second, second[i].second)) << first[i].first;
}

TEST(DeltaRule, RefusesWhatDoesNotFit) {
  const Case good = random_case({.N = 2, .T = 5, .K = 2, .r = 2, .dk = 4, .dv = 4}, {}, 2);
  const auto broken = [&](auto change) {
    Case c = good;
    change(c.input);
    return c.input;
  };
  EXPECT_THROW(delta_rule_forward(broken([](auto& in) { in.lengths = {5}; })), ConfigError);
  EXPECT_THROW(delta_rule_forward(broken([](auto& in) { in.lengths = {5, 6}; })), ConfigError);
  EXPECT_THROW(delta_rule_forward(broken([](auto& in) { in.beta_NTH = in.beta_NTH.to(at::kFloat); })), ConfigError);
  EXPECT_THROW(delta_rule_forward(broken([](auto& in) { in.key_NTKd = at::randn({2, 5, 3, 4}, kDouble); })), ConfigError);
  EXPECT_THROW(delta_rule_forward(broken([](auto& in) { in.state_NHkv = at::randn({2, 4, 4, 5}, kDouble); })), ConfigError);
  EXPECT_THROW(delta_rule_forward(good.input, 0), ConfigError);
  const DeltaRuleOutput without = delta_rule_forward(good.input, 64, false);
  EXPECT_FALSE(without.chunk_states.defined());
  EXPECT_THROW(delta_rule_backward(good.input, without, good.grad_out, {}), ConfigError);
}

}  // namespace
}  // namespace longstraw
