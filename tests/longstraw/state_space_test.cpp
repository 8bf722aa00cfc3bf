// The chunked recurrence of Mamba-2 against the recurrence token by token, written here in the words of its definition.
#include "longstraw/state_space.h"

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
constexpr double kRounding = 1e-12;

struct Shape {
  int64_t N = 1, T = 1, G = 1, r = 1, p = 4, n = 4;
};

struct Case {
  StateSpaceInput input;
  at::Tensor grad_out, grad_end_state;
};

// Decays e^{dt a} with dt·|a| up to about `most`.
Case random_case(const Shape& s, const std::vector<int64_t>& lengths, int64_t states, double most = 0.5) {
  Case c;
  const int64_t H = s.G * s.r;
  c.input.x_NTHp = at::randn({s.N, s.T, H, s.p}, kDouble);
  c.input.dt_NTH = at::rand({s.N, s.T, H}, kDouble);
  c.input.a_H = -most * (0.1 + 0.9 * at::rand({H}, kDouble));
  c.input.b_NTGn = at::randn({s.N, s.T, s.G, s.n}, kDouble);
  c.input.c_NTGn = at::randn({s.N, s.T, s.G, s.n}, kDouble);
  if (states > 0) c.input.state_NHpn = at::randn({states, H, s.p, s.n}, kDouble);
  c.input.lengths = lengths;
  c.grad_out = at::randn({s.N, s.T, H, s.p}, kDouble);
  c.grad_end_state = at::randn({s.N, H, s.p, s.n}, kDouble);
  return c;
}

struct Result {
  at::Tensor out, end_state;
  StateSpaceGradients grads;
};

// Every tensor of a result, to compare it with another.
std::vector<std::pair<const char*, at::Tensor>> parts(const Result& x) {
  return {{"out", x.out},   {"end state", x.end_state}, {"x", x.grads.x}, {"dt", x.grads.dt},
          {"a", x.grads.a}, {"b", x.grads.b},           {"c", x.grads.c}, {"state", x.grads.state}};
}

Result naive(const Case& c) {
  const auto leaf = [](const at::Tensor& x) { return x.defined() ? x.detach().clone().requires_grad_() : x; };
  const StateSpaceInput& in = c.input;
  const at::Tensor x = leaf(in.x_NTHp), dt = leaf(in.dt_NTH), a = leaf(in.a_H), b = leaf(in.b_NTGn), cc = leaf(in.c_NTGn),
                   h0 = leaf(in.state_NHpn);
  const auto wide = dt.scalar_type();
  const int64_t N = x.size(0), T = x.size(1), H = x.size(2), repeat = H / b.size(2);
  std::vector<at::Tensor> outs, ends;
  for (int64_t n = 0; n < N; ++n) {
    at::Tensor state = h0.defined() ? h0[h0.size(0) == 1 ? 0 : n] : at::zeros({H, x.size(3), b.size(3)}, dt.options());
    const int64_t length = in.lengths.empty() ? T : in.lengths[size_t(n)];
    std::vector<at::Tensor> rows;
    for (int64_t t = 0; t < T; ++t) {
      if (t >= length) {
        rows.push_back(at::zeros_like(x[n][t]));
        continue;
      }
      const at::Tensor step = dt[n][t].view({H, 1, 1});
      const at::Tensor into = b[n][t].to(wide).repeat_interleave(repeat, 0).unsqueeze(1);
      const at::Tensor from = cc[n][t].to(wide).repeat_interleave(repeat, 0).unsqueeze(1);
      state = state * (step * a.view({H, 1, 1})).exp() + step * x[n][t].to(wide).unsqueeze(-1) * into;
      rows.push_back((state * from).sum(-1).to(x.scalar_type()));
    }
    outs.push_back(at::stack(rows));
    ends.push_back(state);
  }
  const at::Tensor out = at::stack(outs), end = at::stack(ends);
  at::Tensor loss = at::zeros({}, dt.options());
  if (c.grad_out.defined()) loss = loss + (out.to(wide) * c.grad_out.to(wide)).sum();
  if (c.grad_end_state.defined()) loss = loss + (end * c.grad_end_state).sum();
  if (loss.requires_grad()) loss.backward();
  const auto grad = [](const at::Tensor& t) { return !t.defined() ? t : t.grad().defined() ? t.grad() : at::zeros_like(t); };
  return {out.detach(), end.detach(), {grad(x), grad(dt), grad(a), grad(b), grad(cc), grad(h0)}};
}

Result chunked(const Case& c, int64_t chunk = 64) {
  const StateSpaceOutput out = state_space_forward(c.input, chunk);
  return {out.out_NTHp, out.end_state_NHpn, state_space_backward(c.input, out, c.grad_out, c.grad_end_state, chunk)};
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

RC_GTEST_PROP(StateSpace, ChunksAreTheRecurrence, ()) {
  const auto size = [](std::vector<int64_t> of) { return *rc::gen::elementOf(of); };
  const Shape s{.N = size({1, 2, 3, 5}),
                .T = size({1, 2, 3, 7, 20, 63, 64, 65, 130}),
                .G = size({1, 2, 3}),
                .r = size({1, 2, 3}),
                .p = size({1, 4, 8}),
                .n = size({1, 4, 16})};
  std::vector<int64_t> lengths;
  if (*rc::gen::arbitrary<bool>())
    lengths = *rc::gen::container<std::vector<int64_t>>(size_t(s.N), rc::gen::inRange<int64_t>(0, s.T + 1));
  at::manual_seed(*rc::gen::inRange(0, 1000));
  Case c = random_case(s, lengths, size({0, 1, s.N}), *rc::gen::elementOf(std::vector<double>{0.05, 0.5, 5.0}));
  if (*rc::gen::inRange(0, 4) == 0) c.grad_out.reset();
  if (*rc::gen::inRange(0, 4) == 0) c.grad_end_state.reset();
  const int64_t chunk = size({1, 5, 16, 64});
  RC_ASSERT(worst_error(chunked(c, chunk), naive(c)) <= kRounding);
}

// What transformers' own code gives (fixtures/make_recurrence_golden.py).
TEST(StateSpace, GoldenValuesOfTransformers) {
  const auto golden = test::read_tensors("fixtures/recurrence/state_space.safetensors");
  Case c;
  c.input = {golden.at("x"), golden.at("dt"), golden.at("a"), golden.at("b"), golden.at("c"), golden.at("state"), {}};
  c.grad_out = golden.at("grad_out");
  c.grad_end_state = golden.at("grad_end");
  const Result wanted{golden.at("out"),
                      golden.at("end"),
                      {golden.at("grad.x"), golden.at("grad.dt"), golden.at("grad.a"), golden.at("grad.b"), golden.at("grad.c"),
                       golden.at("grad.state")}};
  for (const int64_t chunk : {7, 64}) EXPECT_LE(worst_error(chunked(c, chunk), wanted), kRounding);
}

TEST(StateSpace, LongAndRaggedSequencesAreTheRecurrence) {
  at::manual_seed(1);
  const Case c = random_case({.N = 7, .T = 200, .G = 2, .r = 2, .p = 8, .n = 8}, {1, 3, 63, 64, 65, 200, 128}, 7);
  EXPECT_LE(worst_error(chunked(c), naive(c)), kRounding);
}

// Heads wide enough that every slice holds one group and a chunk, which small tests never reach.
TEST(StateSpace, WideHeadsAreTheRecurrence) {
  at::manual_seed(2);
  const Case c = random_case({.N = 2, .T = 140, .G = 2, .r = 5, .p = 64, .n = 64}, {140, 71}, 1);
  EXPECT_LE(worst_error(chunked(c), naive(c)), kRounding);
}

// e^{-50 t} underflows within a chunk, and its inverse would overflow.
TEST(StateSpace, StrongDecayIsTheRecurrence) {
  at::manual_seed(3);
  const Shape s{.N = 2, .T = 130, .G = 2, .r = 2, .p = 8, .n = 8};
  Case c = random_case(s, {}, 2, 50.0);
  EXPECT_LE(worst_error(chunked(c), naive(c)), kRounding);
  // Nearly none, and one in ten so strong that all before it is forgotten.
  c = random_case(s, {}, 2, 1e-3);
  c.input.dt_NTH.masked_fill_(at::rand_like(c.input.dt_NTH).lt(0.1), 1e5);
  EXPECT_LE(worst_error(chunked(c), naive(c)), kRounding);
}

TEST(StateSpace, GradientsAreThoseOfFiniteDifferences) {
  at::manual_seed(4);
  Case c = random_case({.N = 2, .T = 9, .G = 1, .r = 2, .p = 3, .n = 2}, {9, 5}, 1);
  const auto loss = [&] {
    const StateSpaceOutput out = state_space_forward(c.input, 4);
    return ((out.out_NTHp * c.grad_out).sum() + (out.end_state_NHpn * c.grad_end_state).sum()).item<double>();
  };
  const Result got = chunked(c, 4);
  const std::vector<std::pair<at::Tensor, at::Tensor>> pairs{{c.input.x_NTHp, got.grads.x}, {c.input.dt_NTH, got.grads.dt},
                                                             {c.input.a_H, got.grads.a},    {c.input.b_NTGn, got.grads.b},
                                                             {c.input.c_NTGn, got.grads.c}, {c.input.state_NHpn, got.grads.state}};
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

Case cast(const Case& c, at::ScalarType narrow, at::ScalarType wide) {
  Case x = c;
  for (at::Tensor* t : {&x.input.x_NTHp, &x.input.b_NTGn, &x.input.c_NTGn, &x.grad_out}) *t = t->to(narrow);
  for (at::Tensor* t : {&x.input.dt_NTH, &x.input.a_H, &x.input.state_NHpn, &x.grad_end_state}) *t = t->to(wide);
  return x;
}

// In float32 too, where the squares of such numbers overflow.
TEST(StateSpace, WhatStandsBehindALengthChangesNothing) {
  at::manual_seed(5);
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    Case c = cast(random_case({.N = 3, .T = 70, .G = 2, .r = 2, .p = 4, .n = 4}, {70, 65, 2}, 3), dtype, dtype);
    const Result before = chunked(c);
    for (at::Tensor* x : {&c.input.x_NTHp, &c.input.dt_NTH, &c.input.b_NTGn, &c.input.c_NTGn, &c.grad_out}) {
      (*x)[1].slice(0, 65).fill_(1e30);
      (*x)[2].slice(0, 2).fill_(-1e30);
    }
    const auto was = parts(before), is = parts(chunked(c));
    for (size_t i = 0; i < was.size(); ++i) EXPECT_TRUE(at::equal(was[i].second, is[i].second)) << was[i].first;
    EXPECT_EQ(before.grads.dt[2].slice(0, 2).abs().max().item<double>(), 0.0);
  }
}

// The state at a cut, carried over with its adjoint, is the uncut sequence.
TEST(StateSpace, ASequenceCutInTwoIsTheWhole) {
  at::manual_seed(6);
  const Case whole = random_case({.N = 2, .T = 100, .G = 2, .r = 1, .p = 8, .n = 4}, {}, 2);
  const Result wanted = chunked(whole);
  for (const int64_t cut : {1, 37, 64, 99}) {
    const auto piece = [&](int64_t begin, int64_t end) {
      Case c = whole;
      for (at::Tensor* x : {&c.input.x_NTHp, &c.input.dt_NTH, &c.input.b_NTGn, &c.input.c_NTGn, &c.grad_out})
        *x = x->slice(1, begin, end);
      return c;
    };
    Case first = piece(0, cut), second = piece(cut, 100);
    second.input.state_NHpn = state_space_forward(first.input, 64, false).end_state_NHpn;
    const Result after = chunked(second);
    first.grad_end_state = after.grads.state;
    const Result before = chunked(first);
    EXPECT_LE(relative_l2(at::cat({before.out, after.out}, 1), wanted.out), kRounding);
    EXPECT_LE(relative_l2(after.end_state, wanted.end_state), kRounding);
    EXPECT_LE(relative_l2(before.grads.state, wanted.grads.state), kRounding);
    EXPECT_LE(relative_l2(before.grads.a + after.grads.a, wanted.grads.a), kRounding);
    EXPECT_LE(relative_l2(at::cat({before.grads.b, after.grads.b}, 1), wanted.grads.b), kRounding);
    EXPECT_LE(relative_l2(at::cat({before.grads.dt, after.grads.dt}, 1), wanted.grads.dt), kRounding);
  }
}

// Each value passes through at most T chunk-to-chunk and in-chunk steps, each a dot product over the key size and the chunk:
// n dependent roundings leave u·sqrt(n) (Higham and Mary 2019); 4 for cancellation, 2 for the way back.
double float_bound(int64_t tokens, int64_t key_size, int64_t chunk) {
  const double u = std::numeric_limits<float>::epsilon() / 2;
  return 4 * 2 * u * std::sqrt(double(tokens + key_size + 2 * chunk));
}

TEST(StateSpace, Float32IsWithinItsRounding) {
  at::manual_seed(7);
  for (const double decay : {0.05, 0.5, 50.0}) {
    const Case c =
        cast(random_case({.N = 2, .T = 200, .G = 2, .r = 2, .p = 16, .n = 32}, {200, 77}, 1, decay), at::kFloat, at::kFloat);
    const Result wanted = naive(cast(c, at::kDouble, at::kDouble));
    EXPECT_LE(worst_error(chunked(c), wanted), float_bound(200, 32, 64)) << decay;
  }
}

TEST(StateSpace, Bfloat16IsNoWorseThanTheRecurrenceInIt) {
  at::manual_seed(8);
  const Case c = cast(random_case({.N = 2, .T = 200, .G = 2, .r = 2, .p = 16, .n = 32}, {200, 77}, 2), at::kBFloat16, at::kFloat);
  const auto exact = parts(naive(cast(c, at::kDouble, at::kDouble))), plain = parts(naive(c)), ours = parts(chunked(c));
  for (size_t i = 0; i < exact.size(); ++i) {
    EXPECT_EQ(ours[i].second.scalar_type(), plain[i].second.scalar_type()) << exact[i].first;
    EXPECT_LE(relative_l2(ours[i].second, exact[i].second),
              1.1 * relative_l2(plain[i].second, exact[i].second) + float_bound(200, 32, 64))
        << exact[i].first;
  }
}

TEST(StateSpace, TheSameInputGivesTheSameBits) {
  at::manual_seed(9);
  const Case c = cast(random_case({.N = 3, .T = 100, .G = 4, .r = 2, .p = 64, .n = 64}, {100, 80, 3}, 3), at::kFloat, at::kFloat);
  const auto first = parts(chunked(c)), second = parts(chunked(c));
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(first[i].second, second[i].second)) << first[i].first;
}

TEST(StateSpace, RefusesWhatDoesNotFit) {
  const Case good = random_case({.N = 2, .T = 5, .G = 2, .r = 2, .p = 4, .n = 4}, {}, 2);
  const auto broken = [&](auto change) {
    Case c = good;
    change(c.input);
    return c.input;
  };
  EXPECT_THROW(state_space_forward(broken([](auto& in) { in.lengths = {5}; })), ConfigError);
  EXPECT_THROW(state_space_forward(broken([](auto& in) { in.lengths = {5, 6}; })), ConfigError);
  EXPECT_THROW(state_space_forward(broken([](auto& in) { in.dt_NTH = in.dt_NTH.to(at::kFloat); })), ConfigError);
  EXPECT_THROW(state_space_forward(broken([](auto& in) { in.b_NTGn = at::randn({2, 5, 3, 4}, kDouble); })), ConfigError);
  EXPECT_THROW(state_space_forward(broken([](auto& in) { in.state_NHpn = at::randn({2, 4, 4, 5}, kDouble); })), ConfigError);
  EXPECT_THROW(state_space_forward(good.input, 0), ConfigError);
  const StateSpaceOutput without = state_space_forward(good.input, 64, false);
  EXPECT_FALSE(without.chunk_states.defined());
  EXPECT_THROW(state_space_backward(good.input, without, good.grad_out, {}), ConfigError);
}

}  // namespace
}  // namespace longstraw
