#include "longstraw/sparse_attention.h"

#include "longstraw/sparse_selection.h"

#include "core/base/errors.h"
#include "core/device/device.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>
#include <string>

namespace longstraw {
namespace {

using core::device::accumulation_dtype;

// Gathered keys of one tile of queries: about what the last cache of a CPU holds, or what keeps a GPU busy. One query's
// keys are gathered at least.
constexpr int64_t kCpuTileElements = int64_t{1} << 21;
constexpr int64_t kGpuTileElements = int64_t{1} << 26;

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

int64_t tile_queries(int64_t key_elements, c10::DeviceType device) {
  const int64_t elements = device == c10::kCPU ? kCpuTileElements : kGpuTileElements;
  return std::max<int64_t>(1, elements / std::max<int64_t>(1, key_elements));
}

int64_t past_tokens(const SparseInput& input) { return input.past_key_Nd.defined() ? input.past_key_Nd.size(0) : 0; }

[[noreturn]] void fail(const std::string& what) { throw ConfigError("sparse attention: " + what); }

void check_shapes(const SparseInput& input) {
  if (input.query_SHd.dim() != 3 || input.query_SHd.numel() == 0) {
    fail("query: shape " + c10::str(input.query_SHd.sizes()) + ", wanted [S, H, d]");
  }
  const int64_t rows = input.query_SHd.size(0), d = input.query_SHd.size(2);
  const auto want_keys = [&](const char* name, const at::Tensor& keys, int64_t count) {
    if (keys.dim() != 2 || keys.size(0) != count || keys.size(1) != d) {
      fail(std::string(name) + ": shape " + c10::str(keys.sizes()) + ", wanted " + c10::str(at::IntArrayRef{count, d}));
    }
    if (keys.scalar_type() != input.query_SHd.scalar_type()) {
      fail(std::string(name) + " is " + c10::toString(keys.scalar_type()) + ", the query " +
           c10::toString(input.query_SHd.scalar_type()));
    }
  };
  want_keys("own key", input.own_key_Sd, rows);
  if (input.past_key_Nd.defined()) want_keys("past key", input.past_key_Nd, past_tokens(input));
  const at::Tensor& positions = input.positions_SK;
  if (positions.dim() != 2 || positions.size(0) != rows)
    fail("positions: shape " + c10::str(positions.sizes()) + ", wanted [S, K]");
  if (positions.scalar_type() != at::kInt && positions.scalar_type() != at::kLong) {
    fail(std::string("positions are ") + c10::toString(positions.scalar_type()));
  }
  if (input.value_width < 1 || input.value_width > d)
    fail("value width " + std::to_string(input.value_width) + " of keys of size " + std::to_string(d));
  check_spans(input.spans, rows);
}

// Consecutive queries attended in one go.
struct Tile {
  int64_t begin = 0, queries = 0;
  int64_t keys = 0;     // the longest list among them
  bool ragged = false;  // some list is shorter
  bool own = false;     // some listed key is not of the past
};

struct Plan {
  at::Tensor first_row_S1;  // row of own_key of the span's first token, less the tokens of the past
  std::vector<Tile> tiles;
};

std::vector<int64_t> per_row(const at::Tensor& counts_S) {
  const at::Tensor plain = counts_S.to(at::kCPU, at::kLong).contiguous();
  return {plain.data_ptr<int64_t>(), plain.data_ptr<int64_t>() + plain.numel()};
}

void check_visible(const SparseInput& input, const at::Tensor& first_row_S1) {
  if (input.positions_SK.numel() == 0) return;
  const at::Tensor row_S1 = at::arange(first_row_S1.size(0), first_row_S1.options()).unsqueeze(1);
  const at::Tensor beyond_S1 = input.positions_SK.amax(1, /*keepdim=*/true).add(first_row_S1).gt(row_S1);
  if (beyond_S1.any().item<bool>()) {
    const auto row = beyond_S1.squeeze(1).nonzero()[0].item<int64_t>();
    fail("query " + std::to_string(row) + " lists position " + std::to_string(input.positions_SK[row].max().item<int64_t>()) +
         ", the last that it sees is " + std::to_string(row - first_row_S1[row].item<int64_t>()));
  }
}

Plan make_plan(const SparseInput& input) {
  check_shapes(input);
  const int64_t rows = input.query_SHd.size(0), past = past_tokens(input);
  std::vector<int64_t> first_row(static_cast<size_t>(rows));
  for (const Span& span : input.spans) std::fill(first_row.begin() + span.begin, first_row.begin() + span.end, span.begin - past);
  Plan plan;
  plan.first_row_S1 = at::tensor(first_row, at::kLong).unsqueeze(1).to(input.query_SHd.device());
  check_visible(input, plan.first_row_S1);

  const auto listed = per_row(input.positions_SK.ge(0).sum(1)), own = per_row(input.positions_SK.ge(past).sum(1));
  const int64_t d = input.query_SHd.size(2), heads = input.query_SHd.size(1);
  const int64_t step = tile_queries(input.positions_SK.size(1) * (d + 2 * heads), input.query_SHd.device().type());
  for (int64_t begin = 0; begin < rows; begin += step) {
    Tile tile{.begin = begin, .queries = std::min(step, rows - begin)};
    for (auto row = static_cast<size_t>(begin); row < static_cast<size_t>(begin + tile.queries); ++row) {
      tile.ragged = tile.ragged || (tile.begin != static_cast<int64_t>(row) && listed[row] != tile.keys);
      tile.keys = std::max(tile.keys, listed[row]);
      tile.own = tile.own || own[row] > 0;
    }
    plan.tiles.push_back(tile);
  }
  return plan;
}

// The dtype of a tile's products. A CPU gains nothing from bfloat16, and wide its scores are not rounded.
at::ScalarType product_dtype(const at::Tensor& query) {
  return query.device().is_cpu() ? accumulation_dtype(query.scalar_type()) : query.scalar_type();
}

// A tile's listed keys.
struct Gathered {
  at::Tensor position_QK;  // -1: none
  at::Tensor key_QKd;      // of a place without a position any key that the query's span sees
};

// Rows of own_key, given positions of the tile's queries, of any shape that broadcasts with one number a query.
at::Tensor own_rows(const Plan& plan, const Tile& tile, const at::Tensor& position_QK) {
  return position_QK.clamp_min(0).add(plan.first_row_S1.narrow(0, tile.begin, tile.queries)).view({-1});
}

Gathered gather(const SparseInput& input, const Plan& plan, const Tile& tile) {
  const at::Tensor position_QK = input.positions_SK.narrow(0, tile.begin, tile.queries).narrow(1, 0, tile.keys);
  const int64_t past = past_tokens(input);
  at::Tensor keys;
  if (past == 0) {
    keys = input.own_key_Sd.index_select(0, own_rows(plan, tile, position_QK));
  } else {
    keys = input.past_key_Nd.index_select(0, position_QK.clamp(0, past - 1).view({-1}));
    if (tile.own) {
      const at::Tensor place = position_QK.ge(past).view({-1}).nonzero().squeeze(1);
      const at::Tensor row = own_rows(plan, tile, position_QK).index_select(0, place);
      keys.index_copy_(0, place, input.own_key_Sd.index_select(0, row));
    }
  }
  return {position_QK, keys.to(product_dtype(input.query_SHd)).view({tile.queries, tile.keys, -1})};
}

// alpha · a b, of each query, wide: what a matrix product of bfloat16 sums in float32 is not rounded before its use.
at::Tensor wide_product(const at::Tensor& a, const at::Tensor& b, double alpha = 1.0) {
  const auto high = accumulation_dtype(a.scalar_type());
  if (a.scalar_type() != high) return at::bmm(a, b, high).mul_(alpha);
  const at::Tensor unused = at::empty({1, 1, 1}, a.options());
  return at::baddbmm(unused, a, b, /*beta=*/0, alpha);
}

at::Tensor scores_QHK(const SparseInput& input, const Tile& tile, const Gathered& gathered, const at::Tensor& query_QHd) {
  at::Tensor scores = wide_product(query_QHd, gathered.key_QKd.transpose(1, 2), input.scale);
  if (tile.ragged) scores.masked_fill_(gathered.position_QK.lt(0).unsqueeze(1), kMinusInfinity);
  return scores;
}

// A query whose list is empty has a maximum and a log-sum-exp of -inf: subtract 0 there, so that e^{-inf - 0} = 0.
at::Tensor finite(const at::Tensor& x) { return x.masked_fill(x.eq(kMinusInfinity), 0.0); }

void attend_tile(const SparseInput& input, const Plan& plan, const Tile& tile, SparseAttention& result) {
  const auto rows = [&](const at::Tensor& x) { return x.narrow(0, tile.begin, tile.queries); };
  const Gathered gathered = gather(input, plan, tile);
  at::Tensor scores = scores_QHK(input, tile, gathered, rows(input.query_SHd).to(gathered.key_QKd.scalar_type()));
  const at::Tensor top_QH1 = finite(scores.amax(-1, /*keepdim=*/true));
  scores.sub_(top_QH1).exp_();
  const at::Tensor sum_QH1 = scores.sum(-1, /*keepdim=*/true);
  const at::Tensor values_QKv = gathered.key_QKd.narrow(2, 0, input.value_width);
  const at::Tensor out_QHv = wide_product(scores.to(values_QKv.scalar_type()), values_QKv);
  rows(result.out_SHv).copy_(out_QHv.div(sum_QH1.masked_fill(sum_QH1.eq(0), 1.0)));
  rows(result.lse_SH).copy_(sum_QH1.log().add_(top_QH1).squeeze(-1));
}

// sum[row[i]] += part[i] for each i in order; row -1: none. Each thread has columns of its own, so that the order of the
// additions, and with it every bit, does not depend on the number of threads.
template <class Sum, class Part>
void add_rows_cpu(const at::Tensor& sum_Md, const at::Tensor& row_N, const at::Tensor& part_Nd) {
  const int64_t rows = row_N.size(0), d = sum_Md.size(1), sum_stride = sum_Md.stride(0);
  Sum* const sum = sum_Md.data_ptr<Sum>();
  const Part* const part = part_Nd.const_data_ptr<Part>();
  const int64_t* const row = row_N.const_data_ptr<int64_t>();
  at::parallel_for(0, d, /*grain_size=*/std::max<int64_t>(16, 32768 / std::max<int64_t>(1, rows)), [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < rows; ++i) {
      if (row[i] < 0) continue;
      Sum* const to = sum + row[i] * sum_stride;
      const Part* const from = part + i * d;
      for (int64_t c = begin; c < end; ++c) to[c] += static_cast<Sum>(from[c]);
    }
  });
}

void add_rows(const at::Tensor& sum_Md, const at::Tensor& row_N, const at::Tensor& part_Nd) {
  if (sum_Md.device().is_cpu() && sum_Md.stride(1) == 1) {
    if (part_Nd.scalar_type() == at::kDouble) return add_rows_cpu<double, double>(sum_Md, row_N, part_Nd);
    if (part_Nd.scalar_type() == at::kFloat) return add_rows_cpu<float, float>(sum_Md, row_N, part_Nd);
    if (part_Nd.scalar_type() == at::kBFloat16) return add_rows_cpu<float, at::BFloat16>(sum_Md, row_N, part_Nd);
  }
  // Accumulating index_put_ sorts by row first: it has a fixed order on a GPU, which index_add_ has not.
  const at::Tensor wanted = row_N.ge(0).nonzero().squeeze(1);
  at::Tensor sum = sum_Md;
  sum.index_put_({row_N.index_select(0, wanted)}, part_Nd.index_select(0, wanted).to(sum.scalar_type()), /*accumulate=*/true);
}

void scatter(const SparseInput& input, const Plan& plan, const Tile& tile, const Gathered& gathered, const at::Tensor& grad_Nd,
             SparseGradients& result, const PastAdjoint& past_adjoint) {
  const int64_t past = past_tokens(input);
  const at::Tensor position_N = gathered.position_QK.to(at::kLong).reshape({-1});
  if (tile.own) {
    add_rows(result.own_key_Sd, own_rows(plan, tile, gathered.position_QK).masked_fill_(position_N.lt(past), -1), grad_Nd);
  }
  if (past > 0 && past_adjoint.sum_Md.defined() && past_adjoint.from < past) {
    add_rows(past_adjoint.sum_Md, (position_N - past_adjoint.from).clamp_min(-1).masked_fill(position_N.ge(past), -1), grad_Nd);
  }
}

void backward_tile(const SparseInput& input, const SparseAttention& merged, const at::Tensor& grad_SHv, const Plan& plan,
                   const Tile& tile, SparseGradients& result, const PastAdjoint& past_adjoint) {
  const auto rows = [&](const at::Tensor& x) { return x.narrow(0, tile.begin, tile.queries); };
  const Gathered gathered = gather(input, plan, tile);
  const auto low = gathered.key_QKd.scalar_type(), high = accumulation_dtype(low);
  const at::Tensor query_QHd = rows(input.query_SHd).to(low), grad_QHv = rows(grad_SHv).to(low);
  at::Tensor p = scores_QHK(input, tile, gathered, query_QHd);
  p.sub_(finite(rows(merged.lse_SH)).unsqueeze(-1)).exp_();
  const at::Tensor delta_QH1 = (rows(grad_SHv).to(high) * rows(merged.out_SHv).to(high)).sum(-1, /*keepdim=*/true);
  const at::Tensor values_QKv = gathered.key_QKd.narrow(2, 0, input.value_width);
  at::Tensor ds = wide_product(grad_QHv, values_QKv.transpose(1, 2));
  ds.sub_(delta_QH1).mul_(p).mul_(input.scale);
  // A key's gradient by score and by value in one product of twice the heads, so that it is rounded once:
  // [scale · ds | p]ᵀ [q | (g, 0)].
  const at::Tensor left_QrK = at::cat({ds.to(low), p.to(low)}, 1);
  rows(result.query_SHd).copy_(wide_product(left_QrK.narrow(1, 0, ds.size(1)), gathered.key_QKd));
  const at::Tensor right_Qrd = at::cat({query_QHd, at::constant_pad_nd(grad_QHv, {0, query_QHd.size(2) - input.value_width})}, 1);
  const at::Tensor grad_QKd = at::bmm(left_QrK.transpose(1, 2), right_Qrd);
  scatter(input, plan, tile, gathered, grad_QKd.view({-1, grad_QKd.size(2)}), result, past_adjoint);
}

void check_backward(const SparseInput& input, const at::Tensor& grad_SHv, const PastAdjoint& past_adjoint) {
  const std::vector<int64_t> out{input.query_SHd.size(0), input.query_SHd.size(1), input.value_width};
  if (grad_SHv.sizes() != out) fail("gradient: shape " + c10::str(grad_SHv.sizes()) + ", wanted " + c10::str(at::IntArrayRef(out)));
  if (!past_adjoint.sum_Md.defined()) return;
  const std::vector<int64_t> sum{past_tokens(input) - past_adjoint.from, input.query_SHd.size(2)};
  if (past_adjoint.from < 0 || past_adjoint.sum_Md.sizes() != sum) {
    fail("adjoint of the past from " + std::to_string(past_adjoint.from) + ": shape " + c10::str(past_adjoint.sum_Md.sizes()) +
         ", wanted " + c10::str(at::IntArrayRef(sum)));
  }
  if (past_adjoint.sum_Md.scalar_type() != accumulation_dtype(input.query_SHd.scalar_type())) {
    fail(std::string("adjoint of the past is ") + c10::toString(past_adjoint.sum_Md.scalar_type()));
  }
}

}  // namespace

SparseAttention sparse_attend(const SparseInput& input) {
  const at::NoGradGuard no_grad;
  const Plan plan = make_plan(input);
  const at::Tensor& query_SHd = input.query_SHd;
  const auto options = query_SHd.options().requires_grad(false);
  SparseAttention result{
      at::zeros({query_SHd.size(0), query_SHd.size(1), input.value_width}, options),
      at::full({query_SHd.size(0), query_SHd.size(1)}, kMinusInfinity, options.dtype(accumulation_dtype(query_SHd.scalar_type())))};
  for (const Tile& tile : plan.tiles) {
    if (tile.keys > 0) attend_tile(input, plan, tile, result);
  }
  return result;
}

SparseGradients sparse_attend_backward(const SparseInput& input, const SparseAttention& merged, const at::Tensor& grad_SHv,
                                       const PastAdjoint& past_adjoint) {
  const at::NoGradGuard no_grad;
  const Plan plan = make_plan(input);
  check_backward(input, grad_SHv, past_adjoint);
  const auto high = accumulation_dtype(input.query_SHd.scalar_type());
  SparseGradients result{at::zeros(input.query_SHd.sizes(), input.query_SHd.options().requires_grad(false)),
                         at::zeros(input.own_key_Sd.sizes(), input.own_key_Sd.options().dtype(high).requires_grad(false))};
  for (const Tile& tile : plan.tiles) {
    if (tile.keys > 0) backward_tile(input, merged, grad_SHv, plan, tile, result, past_adjoint);
  }
  return result;
}

int64_t sparse_attention_bytes(int64_t rows, int64_t heads, int64_t key_size, int64_t listed, c10::ScalarType dtype,
                               c10::DeviceType device) {
  const int64_t queries = std::min(rows, tile_queries(listed * (key_size + 2 * heads), device));
  const auto high = static_cast<int64_t>(c10::elementSize(accumulation_dtype(dtype))),
             given = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t low = device == c10::kCPU ? high : given;
  // Of each listed key the key and its gradient, score, gradient of score and both for the products, and two lists of rows;
  // of each query the right side of the last product.
  const int64_t of_key = 2 * key_size * low + heads * (2 * high + (low == high ? 2 : 4) * low) + 2 * int64_t{sizeof(int64_t)};
  return queries * (listed * of_key + 2 * heads * key_size * low);
}

}  // namespace longstraw
