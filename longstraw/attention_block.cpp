#include "longstraw/attention_block.h"

#include "core/device/device.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

namespace longstraw {
namespace {

using core::device::accumulation_dtype;

constexpr int64_t kTileElements = int64_t{1} << 19;  // of one score tile, so that it stays in cache

// LibTorch's CPU kernel knows no mask and the square causal mask, and keys as wide as values; everything else goes tile by
// tile.
bool has_flash_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const BlockMask& mask) {
  if (!query.device().is_cpu() || query.size(1) == 0 || key.size(1) == 0 || value.size(2) != key.size(2)) return false;
  if (mask.all) return !mask.window;
  const bool square = mask.first_query == mask.first_key && query.size(1) == key.size(1);
  return square && (!mask.window || *mask.window >= key.size(1));
}

int64_t tile_width(int64_t rows) { return std::max<int64_t>(64, kTileElements / std::max<int64_t>(rows, 1)); }

// [H, T, d] -> [G, (H/G)·T, d]: the queries of a group of heads as rows of one matrix.
at::Tensor group_rows(const at::Tensor& x_HTd, int64_t groups) {
  return x_HTd.reshape({groups, x_HTd.size(0) / groups * x_HTd.size(1), x_HTd.size(2)});
}

// Scores may be masked: additive 0 / -inf of shape [T, N] for the tile's keys, repeated over the heads of a group.
at::Tensor tile_bias(const BlockMask& mask, int64_t queries, int64_t key_begin, int64_t keys, const at::Tensor& like) {
  const auto ids = like.options().dtype(at::kLong);
  const at::Tensor q = at::arange(mask.first_query, mask.first_query + queries, ids).unsqueeze(1);
  const at::Tensor k = at::arange(mask.first_key + key_begin, mask.first_key + key_begin + keys, ids).unsqueeze(0);
  at::Tensor hidden = mask.all ? at::zeros({queries, keys}, like.options().dtype(at::kBool)) : k.gt(q);
  if (mask.window) hidden = hidden.logical_or(k.le(q - *mask.window));
  return at::zeros({queries, keys}, like.options()).masked_fill_(hidden, -INFINITY);
}

// a · b − shift in wide dtype; a [G, R, d], b [G, d, n], shift [G, R, 1] or undefined. One pass where dtypes allow it.
at::Tensor product_minus(const at::Tensor& a, const at::Tensor& b, const at::Tensor& shift) {
  const auto high = accumulation_dtype(a.scalar_type());
  if (!shift.defined()) return at::bmm(a, b).to(high);
  if (a.scalar_type() != high) return at::bmm(a, b).to(high).sub_(shift);
  return at::baddbmm(shift.expand({a.size(0), a.size(1), b.size(2)}), a, b, /*beta=*/-1);
}

// Walks over tiles of keys; `tile` gets the scores [G, rT, n] less `shift`, in wide dtype, masked, and the tile's range of
// keys. The queries come with the scale already in them.
template <class Tile>
void for_each_tile(const at::Tensor& query_GRd, const at::Tensor& key_GNd, int64_t queries, const at::Tensor& shift,
                   const BlockMask& mask, Tile tile) {
  const int64_t width = tile_width(query_GRd.size(0) * query_GRd.size(1));
  for (int64_t begin = 0; begin < key_GNd.size(1); begin += width) {
    const int64_t n = std::min(width, key_GNd.size(1) - begin);
    at::Tensor scores = product_minus(query_GRd, key_GNd.narrow(1, begin, n).transpose(1, 2), shift);
    if (!mask.all || mask.window) {
      auto per_head = scores.view({query_GRd.size(0), -1, queries, n});
      per_head.add_(tile_bias(mask, queries, begin, n, scores));
    }
    tile(scores, begin, n);
  }
}

PartialAttention attend_tiled(const at::Tensor& query_HTd, const at::Tensor& key_GNd, const at::Tensor& value_GNd, double scale,
                              const BlockMask& mask) {
  const int64_t groups = key_GNd.size(0), queries = query_HTd.size(1);
  const at::Tensor query_GRd = group_rows(query_HTd * scale, groups);
  const auto options = query_HTd.options().dtype(accumulation_dtype(query_HTd.scalar_type()));
  at::Tensor top = at::full({groups, query_GRd.size(1), 1}, -INFINITY, options);
  at::Tensor sum = at::zeros_like(top);
  at::Tensor out = at::zeros({groups, query_GRd.size(1), value_GNd.size(2)}, options);
  for_each_tile(query_GRd, key_GNd, queries, /*shift=*/{}, mask, [&](at::Tensor& scores, int64_t begin, int64_t n) {
    const at::Tensor new_top = at::maximum(top, scores.amax(-1, /*keepdim=*/true));
    // A row that has seen no key yet keeps top = -inf: subtract 0 there, so that e^{-inf - 0} = 0 and not NaN.
    const at::Tensor shift = new_top.masked_fill(new_top.eq(-INFINITY), 0.0);
    const at::Tensor keep = at::exp(top - shift);
    scores.sub_(shift).exp_();
    sum = sum * keep + scores.sum(-1, /*keepdim=*/true);
    const at::Tensor values = value_GNd.narrow(1, begin, n);
    out.mul_(keep).add_(at::matmul(scores.to(values.scalar_type()), values));
    top = new_top;
  });
  const at::Tensor none = sum.eq(0);
  out.div_(sum.masked_fill(none, 1.0));
  const at::Tensor lse = (top + sum.log()).masked_fill(none, -INFINITY);
  return {out.to(query_HTd.scalar_type()).view({query_HTd.size(0), queries, -1}), lse.view({query_HTd.size(0), queries})};
}

BlockGradients backward_tiled(const at::Tensor& grad_HTd, const at::Tensor& query_HTd, const at::Tensor& key_GNd,
                              const at::Tensor& value_GNd, const PartialAttention& merged, double scale, const BlockMask& mask,
                              bool want_key_value) {
  const int64_t groups = key_GNd.size(0), queries = query_HTd.size(1);
  const auto high = accumulation_dtype(query_HTd.scalar_type());
  const at::Tensor query_GRd = group_rows(query_HTd * scale, groups), grad_GRd = group_rows(grad_HTd, groups);
  const at::Tensor lse = merged.lse_HT.reshape({groups, -1, 1});
  const at::Tensor delta = (grad_HTd.to(high) * merged.out_HTd.to(high)).sum(-1).reshape({groups, -1, 1});
  at::Tensor dq = at::zeros(query_GRd.sizes(), query_HTd.options().dtype(high));
  BlockGradients result;
  if (want_key_value) {
    result.key_GNd = at::empty(key_GNd.sizes(), key_GNd.options().dtype(high));
    result.value_GNd = at::empty(value_GNd.sizes(), value_GNd.options().dtype(high));
  }
  for_each_tile(query_GRd, key_GNd, queries, lse, mask, [&](at::Tensor& scores, int64_t begin, int64_t n) {
    at::Tensor& p = scores.exp_();
    const at::Tensor keys = key_GNd.narrow(1, begin, n), values = value_GNd.narrow(1, begin, n);
    if (want_key_value) {
      result.value_GNd.narrow(1, begin, n).copy_(at::bmm(p.to(grad_GRd.scalar_type()).transpose(1, 2), grad_GRd));
    }
    const at::Tensor ds = p.mul_(product_minus(grad_GRd, values.transpose(1, 2), delta)).to(query_GRd.scalar_type());
    if (ds.scalar_type() == high) {
      dq.baddbmm_(ds, keys);
    } else {
      dq.add_(at::bmm(ds, keys));
    }
    if (want_key_value) result.key_GNd.narrow(1, begin, n).copy_(at::bmm(ds.transpose(1, 2), query_GRd));
  });
  dq.mul_(scale);
  result.query_HTd = dq.to(query_HTd.scalar_type()).view(query_HTd.sizes());
  return result;
}

}  // namespace

int64_t tile_bytes(int64_t rows, int64_t keys, c10::ScalarType dtype) {
  // Scores and the gradient of them, wide; in a narrow dtype also the product that one of them was converted from.
  const auto high = static_cast<int64_t>(c10::elementSize(accumulation_dtype(dtype))),
             low = static_cast<int64_t>(c10::elementSize(dtype));
  return rows * std::min(keys, tile_width(rows)) * (2 * high + (low == high ? 0 : low));
}

int64_t flash_scratch_bytes(int64_t queries, int64_t keys, c10::ScalarType dtype) {
  // The kernel's own block sizes; each thread has a block of scores and one of their gradient, wide and narrow.
  const int64_t query_block = queries >= 768 ? 256 : queries >= 192 ? 64 : 32;
  const auto high = static_cast<int64_t>(c10::elementSize(accumulation_dtype(dtype))),
             low = static_cast<int64_t>(c10::elementSize(dtype));
  return at::get_num_threads() * query_block * std::min<int64_t>(keys, 512) * 2 * (high + (low == high ? 0 : low));
}

PartialAttention attend_block(const at::Tensor& query_HTd, const at::Tensor& key_GNd, const at::Tensor& value_GNd, double scale,
                              const BlockMask& mask) {
  if (!has_flash_kernel(query_HTd, key_GNd, value_GNd, mask)) return attend_tiled(query_HTd, key_GNd, value_GNd, scale, mask);
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      query_HTd.unsqueeze(0), key_GNd.unsqueeze(0), value_GNd.unsqueeze(0), /*dropout_p=*/0.0, /*is_causal=*/!mask.all,
      /*attn_mask=*/{}, scale);
  return {out.squeeze(0), lse.squeeze(0)};
}

void merge_partial(PartialAttention& into, const PartialAttention& other) {
  if (!into.out_HTd.defined()) {
    into = other;
    return;
  }
  const at::Tensor lse = at::logaddexp(into.lse_HT, other.lse_HT);
  const auto share = [&](const at::Tensor& part) { return at::exp(part - lse.masked_fill(lse.eq(-INFINITY), 0.0)).unsqueeze(-1); };
  // Type promotion makes the merged output wide: rounding to bfloat16 once at the end, not once a block.
  into.out_HTd = at::mul(into.out_HTd, share(into.lse_HT)).addcmul_(other.out_HTd.to(lse.scalar_type()), share(other.lse_HT));
  into.lse_HT = lse;
}

BlockGradients attend_block_backward(const at::Tensor& grad_HTd, const at::Tensor& query_HTd, const at::Tensor& key_GNd,
                                     const at::Tensor& value_GNd, const PartialAttention& merged, double scale,
                                     const BlockMask& mask, bool want_key_value) {
  // LibTorch's kernel always computes all three gradients: where only the queries' is wanted, tiles are faster.
  if (!want_key_value || !has_flash_kernel(query_HTd, key_GNd, value_GNd, mask)) {
    return backward_tiled(grad_HTd, query_HTd, key_GNd, value_GNd, merged, scale, mask, want_key_value);
  }
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad_HTd.unsqueeze(0), query_HTd.unsqueeze(0), key_GNd.unsqueeze(0), value_GNd.unsqueeze(0), merged.out_HTd.unsqueeze(0),
      merged.lse_HT.unsqueeze(0), /*dropout_p=*/0.0, /*is_causal=*/!mask.all,
      /*attn_mask=*/{}, scale);
  return {dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)};
}

}  // namespace longstraw
