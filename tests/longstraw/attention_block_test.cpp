#include "longstraw/attention_block.h"

#include "tests/support/closeness.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace longstraw {
namespace {

constexpr double kRounding = 1e-13;  // float64, sums of at most a few hundred terms

struct Inputs {
  at::Tensor query, key, value, grad;
};

Inputs random_inputs(int64_t heads, int64_t groups, int64_t queries, int64_t keys, int64_t d) {
  const auto options = at::TensorOptions(at::kDouble);
  return {at::randn({heads, queries, d}, options), at::randn({groups, keys, d}, options), at::randn({groups, keys, d}, options),
          at::randn({heads, queries, d}, options)};
}

// One row and one head at a time, in the words of the definition.
at::Tensor visible(const BlockMask& mask, int64_t queries, int64_t keys) {
  at::Tensor m = at::zeros({queries, keys}, at::kBool);
  for (int64_t t = 0; t < queries; ++t) {
    for (int64_t n = 0; n < keys; ++n) {
      const int64_t q = mask.first_query + t, k = mask.first_key + n;
      m[t][n] = (mask.all || k <= q) && (!mask.window || k > q - *mask.window);
    }
  }
  return m;
}

struct Naive {
  at::Tensor out, dq, dk, dv;
};

// Softmax over the keys that either block shows, through autograd.
Naive naive(const Inputs& in, const at::Tensor& visible_TN, double scale) {
  const int64_t repeat = in.query.size(0) / in.key.size(0);
  at::Tensor q = in.query.detach().requires_grad_(), k = in.key.detach().requires_grad_(), v = in.value.detach().requires_grad_();
  at::Tensor scores = at::matmul(q, k.repeat_interleave(repeat, 0).transpose(1, 2)) * scale;
  scores = scores.masked_fill(visible_TN.logical_not(), -INFINITY);
  const at::Tensor out = at::matmul(at::softmax(scores, -1), v.repeat_interleave(repeat, 0));
  out.backward(in.grad);
  return {out.detach(), q.grad(), k.grad(), v.grad()};
}

RC_GTEST_PROP(AttentionBlock, MergedBlocksAreAttentionOverAllKeys, ()) {
  const int64_t groups = *rc::gen::inRange(1, 4), repeat = *rc::gen::inRange(1, 4),
                d = *rc::gen::elementOf(std::vector<int64_t>{1, 4, 8, 16});
  const int64_t queries = *rc::gen::inRange(1, 20), past = *rc::gen::inRange(0, 30);
  const int64_t window = *rc::gen::elementOf(std::vector<int64_t>{0, 1, 2, 7, 100});
  const auto limit = window == 0 ? std::nullopt : std::optional(window);
  const double scale = 0.3;
  at::manual_seed(*rc::gen::inRange(0, 1000));
  const Inputs in = random_inputs(groups * repeat, groups, queries, past + queries, d);
  const BlockMask own{.all = false, .first_query = past, .first_key = past, .window = limit};
  const BlockMask before{.all = true, .first_query = past, .first_key = 0, .window = limit};
  BlockMask whole = own;
  whole.first_key = 0;
  const Naive wanted = naive(in, visible(whole, queries, past + queries), scale);

  const auto keys = [&](int64_t begin, int64_t n) { return in.key.narrow(1, begin, n); };
  const auto values = [&](int64_t begin, int64_t n) { return in.value.narrow(1, begin, n); };
  PartialAttention merged = attend_block(in.query, keys(past, queries), values(past, queries), scale, own);
  if (past > 0) merge_partial(merged, attend_block(in.query, keys(0, past), values(0, past), scale, before));
  RC_ASSERT(test::relative_l2(merged.out_HTd, wanted.out) <= kRounding);

  auto grads = attend_block_backward(in.grad, in.query, keys(past, queries), values(past, queries), merged, scale, own, true);
  // Absolute: a query that sees a single key has no key gradient at all, and inputs are of size 1.
  RC_ASSERT((grads.key_GNd - wanted.dk.narrow(1, past, queries)).abs().max().item<double>() <= 1e-12);
  RC_ASSERT((grads.value_GNd - wanted.dv.narrow(1, past, queries)).abs().max().item<double>() <= 1e-12);
  at::Tensor dq = grads.query_HTd;
  if (past > 0) {
    const auto older = attend_block_backward(in.grad, in.query, keys(0, past), values(0, past), merged, scale, before, true);
    RC_ASSERT((older.key_GNd - wanted.dk.narrow(1, 0, past)).abs().max().item<double>() <= 1e-12);
    RC_ASSERT((older.value_GNd - wanted.dv.narrow(1, 0, past)).abs().max().item<double>() <= 1e-12);
    // Without key and value gradients: another kernel, the same query gradient.
    const auto queries_only =
        attend_block_backward(in.grad, in.query, keys(0, past), values(0, past), merged, scale, before, false);
    RC_ASSERT(!queries_only.key_GNd.defined());
    RC_ASSERT((queries_only.query_HTd - older.query_HTd).abs().max().item<double>() <= 1e-12);
    dq = dq + older.query_HTd;
  }
  RC_ASSERT((dq - wanted.dq).abs().max().item<double>() <= 1e-12);
}

TEST(AttentionBlock, ABlockThatNoQuerySeesChangesNothing) {
  const Inputs in = random_inputs(4, 2, 3, 5, 8);
  const BlockMask hidden{.all = true, .first_query = 100, .first_key = 0, .window = 4};
  const auto part = attend_block(in.query, in.key, in.value, 1.0, hidden);
  EXPECT_EQ(part.out_HTd.abs().max().item<double>(), 0.0);
  EXPECT_TRUE(part.lse_HT.eq(-INFINITY).all().item<bool>());
  PartialAttention merged = attend_block(in.query, in.key, in.value, 1.0, {});
  const at::Tensor before = merged.out_HTd.clone();
  merge_partial(merged, part);
  EXPECT_TRUE(at::equal(merged.out_HTd, before));
}

// Tiles of keys: more keys than one tile holds.
TEST(AttentionBlock, TilesOfKeysAddUp) {
  const Inputs in = random_inputs(6, 2, 300, 2500, 8);
  const BlockMask windowed{.all = true, .first_query = 2500, .first_key = 0, .window = 2400};
  const Naive wanted = naive(in, visible(windowed, 300, 2500), 0.5);
  const auto part = attend_block(in.query, in.key, in.value, 0.5, windowed);
  EXPECT_LE(test::relative_l2(part.out_HTd, wanted.out), kRounding);
  const auto grads = attend_block_backward(in.grad, in.query, in.key, in.value, part, 0.5, windowed, true);
  EXPECT_LE(test::relative_l2(grads.query_HTd, wanted.dq), 1e-12);
  EXPECT_LE(test::relative_l2(grads.key_GNd, wanted.dk), 1e-12);
  EXPECT_LE(test::relative_l2(grads.value_GNd, wanted.dv), 1e-12);
}

}  // namespace
}  // namespace longstraw
