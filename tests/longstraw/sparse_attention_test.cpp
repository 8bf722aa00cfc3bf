#include "longstraw/sparse_attention.h"

#include "longstraw/attention_block.h"

#include "core/base/errors.h"
#include "core/device/memory_meter.h"
#include "tests/support/closeness.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace longstraw {
namespace {

class CountAllocations : public testing::Environment {
 public:
  void SetUp() override { core::device::install_counting_allocator(); }
};
const auto* const kCounting = testing::AddGlobalTestEnvironment(new CountAllocations);

// float64, inputs of size 1, sums of at most a few hundred terms. Absolute: a query that lists a single key has no
// gradient through its score at all, only the rounding of one.
constexpr double kRounding = 1e-12;

double most_apart(const at::Tensor& got, const at::Tensor& wanted) {
  if (!got.sizes().equals(wanted.sizes()) || !got.isfinite().all().item<bool>()) return std::numeric_limits<double>::infinity();
  return got.numel() == 0 ? 0.0 : (got.to(at::kDouble) - wanted.to(at::kDouble)).abs().max().item<double>();
}

struct Shape {
  int64_t past = 0;
  std::vector<int64_t> lengths;
  int64_t heads = 1, d = 4, v = 3;
  int64_t listed = 1;  // at most
};

struct Case {
  SparseInput input;
  at::Tensor grad_SHv;
};

// Every query lists min(listed, what it sees) positions, drawn without repetition.
Case draw_case(const Shape& shape) {
  const int64_t rows = std::accumulate(shape.lengths.begin(), shape.lengths.end(), int64_t{0});
  const auto options = at::TensorOptions(at::kDouble);
  const int64_t width = std::min(shape.listed, shape.past + *std::max_element(shape.lengths.begin(), shape.lengths.end()));
  Case result;
  SparseInput& in = result.input;
  in = {at::randn({rows, shape.heads, shape.d}, options), at::randn({rows, shape.d}, options), {}, {}, {}, shape.v, 0.4};
  if (shape.past > 0) in.past_key_Nd = at::randn({shape.past, shape.d}, options);
  in.positions_SK = at::full({rows, width}, -1, at::kInt);
  int64_t row = 0;
  for (const int64_t length : shape.lengths) {
    in.spans.push_back({row, row + length});
    for (int64_t r = 0; r < length; ++r, ++row) {
      const int64_t count = std::min(width, shape.past + r + 1);
      const at::Tensor drawn = std::get<0>(at::randperm(shape.past + r + 1).slice(0, 0, count).sort());
      in.positions_SK[row].slice(0, 0, count).copy_(drawn);
    }
  }
  result.grad_SHv = at::randn({rows, shape.heads, shape.v}, options);
  return result;
}

struct Naive {
  at::Tensor out, lse, dq, d_own, d_past;
};

// One query at a time, in the words of the definition, through autograd.
Naive naive(const Case& c) {
  const SparseInput& in = c.input;
  const int64_t d = in.query_SHd.size(2);
  at::Tensor q = in.query_SHd.detach().to(at::kDouble).requires_grad_(),
             own = in.own_key_Sd.detach().to(at::kDouble).requires_grad_();
  at::Tensor past = (in.past_key_Nd.defined() ? in.past_key_Nd.detach() : at::zeros({0, d})).to(at::kDouble).requires_grad_();
  std::vector<at::Tensor> outs, lses;
  for (const Span& span : in.spans) {
    const at::Tensor sequence = at::cat({past, own.slice(0, span.begin, span.end)}, 0);
    for (int64_t row = span.begin; row < span.end; ++row) {
      const at::Tensor list = in.positions_SK[row].to(at::kLong);
      const at::Tensor keys = sequence.index_select(0, list.masked_select(list.ge(0)));
      const at::Tensor scores = at::matmul(q[row], keys.t()) * in.scale;
      outs.push_back(at::matmul(at::softmax(scores, -1), keys.slice(1, 0, in.value_width)));
      lses.push_back(at::logsumexp(scores, {-1}));
    }
  }
  const at::Tensor out = at::stack(outs);
  out.backward(c.grad_SHv.to(at::kDouble));
  const at::Tensor d_past = past.grad().defined() ? past.grad() : at::zeros_like(past);
  return {out.detach(), at::stack(lses).detach(), q.grad(), own.grad(), d_past};
}

std::vector<int64_t> draw_lengths() {
  std::vector<int64_t> lengths(static_cast<size_t>(*rc::gen::inRange<int64_t>(1, 4)));
  for (auto& length : lengths) length = *rc::gen::inRange<int64_t>(1, 12);
  return lengths;
}

RC_GTEST_PROP(SparseAttention, IsSoftmaxOverTheListedKeysAndItsGradient, ()) {
  at::manual_seed(*rc::gen::inRange(0, 100000));
  const int64_t d = *rc::gen::inRange<int64_t>(1, 9);
  const Shape shape{.past = *rc::gen::inRange<int64_t>(0, 25),
                    .lengths = draw_lengths(),
                    .heads = *rc::gen::inRange<int64_t>(1, 5),
                    .d = d,
                    .v = *rc::gen::inRange<int64_t>(1, d + 1),
                    .listed = *rc::gen::inRange<int64_t>(1, 40)};
  Case c = draw_case(shape);
  if (*rc::gen::arbitrary<bool>()) c.input.positions_SK = c.input.positions_SK.to(at::kLong);
  const Naive wanted = naive(c);
  const SparseAttention got = sparse_attend(c.input);
  RC_ASSERT(most_apart(got.out_SHv, wanted.out) <= kRounding);
  RC_ASSERT(most_apart(got.lse_SH, wanted.lse) <= kRounding);

  // The adjoint is part of a longer buffer that holds sums already, and only positions from `from` on want any.
  const int64_t from = *rc::gen::inRange<int64_t>(0, shape.past + 1);
  const at::Tensor buffer = at::randn({shape.past + 5, d}, at::kDouble);
  const at::Tensor before = buffer.clone();
  const PastAdjoint adjoint{buffer.slice(0, from, shape.past), from};
  const SparseGradients grads = sparse_attend_backward(c.input, got, c.grad_SHv, adjoint);
  RC_ASSERT(most_apart(grads.query_SHd, wanted.dq) <= kRounding);
  RC_ASSERT(most_apart(grads.own_key_Sd, wanted.d_own) <= kRounding);
  RC_ASSERT(most_apart(adjoint.sum_Md, before.slice(0, from, shape.past) + wanted.d_past.slice(0, from)) <= kRounding);
  RC_ASSERT(at::equal(buffer.slice(0, 0, from), before.slice(0, 0, from)));
  RC_ASSERT(at::equal(buffer.slice(0, shape.past), before.slice(0, shape.past)));

  const SparseGradients without = sparse_attend_backward(c.input, got, c.grad_SHv, {});
  RC_ASSERT(at::equal(without.query_SHd, grads.query_SHd));
  RC_ASSERT(at::equal(without.own_key_Sd, grads.own_key_Sd));
}

// Several tiles of queries, with keys of the past and own ones in each.
const Shape kLarge{.past = 900, .lengths = {60, 30, 1}, .heads = 3, .d = 72, .v = 64, .listed = 700};

TEST(SparseAttention, TilesOfQueriesAddUp) {
  at::manual_seed(1);
  const Case c = draw_case(kLarge);
  const int64_t whole = sparse_attention_bytes(91, 3, 72, 700, at::kDouble, c10::kCPU);
  ASSERT_EQ(sparse_attention_bytes(40, 3, 72, 700, at::kDouble, c10::kCPU), whole) << "too small to be cut into tiles";
  const Naive wanted = naive(c);
  const SparseAttention got = sparse_attend(c.input);
  const at::Tensor adjoint = at::zeros({900, 72}, at::kDouble);
  const SparseGradients grads = sparse_attend_backward(c.input, got, c.grad_SHv, {adjoint, 0});
  EXPECT_LE(most_apart(got.out_SHv, wanted.out), kRounding);
  EXPECT_LE(most_apart(grads.query_SHd, wanted.dq), kRounding);
  EXPECT_LE(most_apart(grads.own_key_Sd, wanted.d_own), kRounding);
  EXPECT_LE(most_apart(adjoint, wanted.d_past), kRounding);
}

Case in_dtype(const Case& c, at::ScalarType dtype) {
  Case result = c;
  result.input.query_SHd = c.input.query_SHd.to(dtype);
  result.input.own_key_Sd = c.input.own_key_Sd.to(dtype);
  result.input.past_key_Nd = c.input.past_key_Nd.to(dtype);
  result.grad_SHv = c.grad_SHv.to(dtype);
  return result;
}

class SparseAttentionIn : public testing::TestWithParam<at::ScalarType> {};

// Against float64 on the same rounded inputs. In float32 a value passes through at most n = d + v + K + H dependent roundings
// of size u, half an epsilon, which leave 4 u sqrt(n) (tests/support/closeness.h, which also says where the 4 comes from). In
// bfloat16 everything is computed in float32 on a CPU and rounded where it is handed over: a result once, and the output,
// which the backward pass reads, before that. Two roundings of at most u, without sums between them: u sqrt(2).
TEST_P(SparseAttentionIn, NarrowDtypesAreRoundedFloat64) {
  at::manual_seed(2);
  const Case c = in_dtype(draw_case(kLarge), GetParam());
  const bool half = GetParam() == at::kBFloat16;
  const double u = (half ? std::ldexp(1.0, -7) : std::numeric_limits<float>::epsilon()) / 2;
  const double bound = half ? u * std::sqrt(2.0) : 4 * u * std::sqrt(72 + 64 + 700 + 3);
  const Naive wanted = naive(c);
  const SparseAttention got = sparse_attend(c.input);
  const at::Tensor adjoint = at::zeros({900, 72}, at::kFloat);
  const SparseGradients grads = sparse_attend_backward(c.input, got, c.grad_SHv, {adjoint, 0});
  EXPECT_EQ(got.out_SHv.scalar_type(), GetParam());
  EXPECT_EQ(got.lse_SH.scalar_type(), at::kFloat);
  EXPECT_EQ(grads.query_SHd.scalar_type(), GetParam());
  EXPECT_EQ(grads.own_key_Sd.scalar_type(), at::kFloat);
  EXPECT_LE(test::relative_l2(got.out_SHv, wanted.out), bound);
  EXPECT_LE(test::relative_l2(got.lse_SH, wanted.lse), bound);
  EXPECT_LE(test::relative_l2(grads.query_SHd, wanted.dq), bound);
  EXPECT_LE(test::relative_l2(grads.own_key_Sd, wanted.d_own), bound);
  EXPECT_LE(test::relative_l2(adjoint, wanted.d_past), bound);
}

TEST_P(SparseAttentionIn, TheSameInputsGiveTheSameBits) {
  at::manual_seed(3);
  const Case c = in_dtype(draw_case(kLarge), GetParam());
  const auto run = [&] {
    const SparseAttention got = sparse_attend(c.input);
    const at::Tensor adjoint = at::zeros({900, 72}, at::kFloat);
    const SparseGradients grads = sparse_attend_backward(c.input, got, c.grad_SHv, {adjoint, 0});
    return std::vector<at::Tensor>{got.out_SHv, got.lse_SH, grads.query_SHd, grads.own_key_Sd, adjoint};
  };
  const auto first = run(), second = run();
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(first[i], second[i])) << i;
}

INSTANTIATE_TEST_SUITE_P(Dtypes, SparseAttentionIn, testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

// The plan is a sum of the large tensors; 5 % are left for small ones and for rounding to the allocator's granule.
TEST_P(SparseAttentionIn, TheBackwardPassHoldsTheBytesItPlans) {
  at::manual_seed(8);
  const core::device::MemoryMeter meter(at::kCPU);
  const Case c = in_dtype(draw_case(kLarge), GetParam());
  const SparseAttention got = sparse_attend(c.input);
  const at::Tensor adjoint = at::zeros({900, 72}, at::kFloat);
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  const SparseGradients grads = sparse_attend_backward(c.input, got, c.grad_SHv, {adjoint, 0});
  const auto results = static_cast<int64_t>(grads.query_SHd.nbytes() + grads.own_key_Sd.nbytes());
  const auto held = static_cast<double>(meter.peak_bytes() - before - results);
  const auto planned = static_cast<double>(sparse_attention_bytes(91, 3, 72, 700, GetParam(), c10::kCPU));
  EXPECT_NEAR(held, planned, 0.05 * planned);
}

// Independent of lists: every visible key listed is causal attention over past and own keys.
TEST(SparseAttention, AllVisibleKeysListedIsDenseAttention) {
  at::manual_seed(4);
  const Case c = draw_case({.past = 20, .lengths = {15}, .heads = 4, .d = 8, .v = 8, .listed = 35});
  const auto in = c.input;
  const at::Tensor keys = at::cat({in.past_key_Nd, in.own_key_Sd}, 0).unsqueeze(0);
  const auto dense = attend_block(in.query_SHd.transpose(0, 1), keys, keys, in.scale, {.all = false, .first_query = 20});
  const SparseAttention got = sparse_attend(in);
  EXPECT_LE(most_apart(got.out_SHv, dense.out_HTd.transpose(0, 1)), kRounding);
  EXPECT_LE(most_apart(got.lse_SH, dense.lse_HT.t()), kRounding);
}

// Lists cut in two, as ranks that hold different keys would have them, some of them empty.
TEST(SparseAttention, DisjointListsMergeByLogSumExpAndTheirGradientsAdd) {
  at::manual_seed(5);
  const Case c = draw_case({.past = 10, .lengths = {6, 4}, .heads = 2, .d = 5, .v = 4, .listed = 7});
  const Naive wanted = naive(c);
  SparseInput part[2] = {c.input, c.input};
  part[0].positions_SK = at::full_like(c.input.positions_SK, -1);
  part[1].positions_SK = at::full_like(c.input.positions_SK, -1);
  for (int64_t row = 0; row < 10; ++row) {
    const at::Tensor list = c.input.positions_SK[row].masked_select(c.input.positions_SK[row].ge(0));
    const int64_t cut = row % 3 == 0 ? 0 : std::min<int64_t>(row % 3, list.size(0));
    part[0].positions_SK[row].slice(0, 0, cut).copy_(list.slice(0, 0, cut));
    part[1].positions_SK[row].slice(0, 0, list.size(0) - cut).copy_(list.slice(0, cut));
  }
  PartialAttention merged;
  for (const auto& in : part) {
    const SparseAttention got = sparse_attend(in);
    merge_partial(merged, {got.out_SHv, got.lse_SH});
  }
  EXPECT_LE(most_apart(merged.out_HTd, wanted.out), kRounding);
  EXPECT_LE(most_apart(merged.lse_HT, wanted.lse), kRounding);
  const at::Tensor adjoint = at::zeros({10, 5}, at::kDouble);
  at::Tensor dq = at::zeros_like(wanted.dq), d_own = at::zeros_like(wanted.d_own);
  for (const auto& in : part) {
    const auto grads = sparse_attend_backward(in, {merged.out_HTd, merged.lse_HT}, c.grad_SHv, {adjoint, 0});
    dq += grads.query_SHd;
    d_own += grads.own_key_Sd;
  }
  EXPECT_LE(most_apart(dq, wanted.dq), kRounding);
  EXPECT_LE(most_apart(d_own, wanted.d_own), kRounding);
  EXPECT_LE(most_apart(adjoint, wanted.d_past), kRounding);
}

TEST(SparseAttention, AnEmptyListGivesZeroAndNoGradient) {
  at::manual_seed(6);
  Case c = draw_case({.past = 3, .lengths = {4}, .heads = 2, .d = 4, .v = 3, .listed = 3});
  c.input.positions_SK[2].fill_(-1);
  const SparseAttention got = sparse_attend(c.input);
  EXPECT_EQ(got.out_SHv[2].abs().max().item<double>(), 0.0);
  EXPECT_TRUE(got.lse_SH[2].eq(-std::numeric_limits<double>::infinity()).all().item<bool>());
  const auto grads = sparse_attend_backward(c.input, got, c.grad_SHv, {});
  EXPECT_EQ(grads.query_SHd[2].abs().max().item<double>(), 0.0);
  EXPECT_TRUE(grads.query_SHd.isfinite().all().item<bool>());
  EXPECT_TRUE(grads.own_key_Sd.isfinite().all().item<bool>());
}

TEST(SparseAttention, RefusesWhatDoesNotFitTogether) {
  at::manual_seed(7);
  const Case c = draw_case({.past = 3, .lengths = {4, 2}, .heads = 2, .d = 4, .v = 3, .listed = 3});
  const auto refuses = [&](auto change) {
    SparseInput bad = c.input;
    bad.positions_SK = bad.positions_SK.clone();
    change(bad);
    EXPECT_THROW(sparse_attend(bad), ConfigError);
  };
  refuses([](SparseInput& in) { in.value_width = 5; });
  refuses([](SparseInput& in) { in.spans.pop_back(); });
  refuses([](SparseInput& in) { in.past_key_Nd = in.past_key_Nd.to(at::kFloat); });
  refuses([](SparseInput& in) { in.own_key_Sd = in.own_key_Sd.slice(0, 1); });
  refuses([](SparseInput& in) { in.positions_SK = in.positions_SK.to(at::kDouble); });
  // The token after the query's own; for the second span's first token that is position 4.
  refuses([](SparseInput& in) { in.positions_SK[4][2] = 4; });
  refuses([](SparseInput& in) { in.positions_SK[0][2] = 4; });
  const SparseAttention got = sparse_attend(c.input);
  EXPECT_THROW(sparse_attend_backward(c.input, got, c.grad_SHv, {at::zeros({3, 4}, at::kDouble), 1}), ConfigError);
  EXPECT_THROW(sparse_attend_backward(c.input, got, c.grad_SHv, {at::zeros({3, 4}, at::kFloat), 0}), ConfigError);
  EXPECT_THROW(sparse_attend_backward(c.input, got, c.grad_SHv.slice(2, 1), {}), ConfigError);
}

}  // namespace
}  // namespace longstraw
