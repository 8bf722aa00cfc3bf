#include "longstraw/sparse_selection.h"

#include "core/base/errors.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <limits>
#include <string>

namespace longstraw {
namespace {

// Scores of one head of a tile of queries against one block of keys: as many as stay in the cache of a CPU, or keep a GPU
// busy.
constexpr int64_t kCpuTileElements = int64_t{1} << 19;
constexpr int64_t kGpuTileElements = int64_t{1} << 24;
constexpr int64_t kKeyBlock = 4096;

int64_t past_tokens(const SelectionInput& input) { return input.past_key_Nd.defined() ? input.past_key_Nd.size(0) : 0; }

int64_t longest_span(const std::vector<Span>& spans) {
  int64_t longest = 0;
  for (const Span& span : spans) longest = std::max(longest, span.end - span.begin);
  return longest;
}

struct Cut {
  int64_t key_block, query_tile;
  int64_t heads;  // in one matrix product: a few queries (decoding) would leave it too small otherwise
};

Cut make_cut(const SelectionSize& size, const SelectionTiling& tiling) {
  const int64_t elements = size.device == c10::kCPU ? kCpuTileElements : kGpuTileElements;
  Cut cut{tiling.key_block, tiling.query_tile, 1};
  if (cut.key_block <= 0) cut.key_block = std::max(kKeyBlock, 2 * size.top_k);  // of a merge two thirds are new keys
  if (cut.query_tile <= 0) cut.query_tile = std::clamp<int64_t>(elements / cut.key_block, 1, size.rows);
  cut.heads = std::clamp<int64_t>(elements / (cut.query_tile * cut.key_block), 1, size.heads);
  return cut;
}

SelectionSize size_of(const SelectionInput& input) {
  return {.rows = input.query_Shd.size(0),
          .heads = input.query_Shd.size(1),
          .head_dim = input.query_Shd.size(2),
          .keys = past_tokens(input) + longest_span(input.spans),
          .top_k = input.top_k,
          .dtype = input.query_Shd.scalar_type(),
          .device = input.query_Shd.device().type()};
}

void check(const SelectionInput& input) {
  const auto fail = [](const std::string& what) { throw ConfigError("select_top_keys: " + what); };
  if (input.query_Shd.dim() != 3) fail("query has " + std::to_string(input.query_Shd.dim()) + " dimensions, wanted [S, h, d]");
  if (input.query_Shd.numel() == 0) fail("query is empty: shape " + c10::str(input.query_Shd.sizes()));
  const int64_t rows = input.query_Shd.size(0), heads = input.query_Shd.size(1), d = input.query_Shd.size(2);
  const auto want = [&](const char* name, const at::Tensor& tensor, int64_t first, int64_t second) {
    if (tensor.dim() == 2 && tensor.size(0) == first && tensor.size(1) == second) return;
    fail(std::string(name) + ": shape " + c10::str(tensor.sizes()) + ", wanted " + c10::str(at::IntArrayRef{first, second}));
  };
  want("own key", input.own_key_Sd, rows, d);
  want("weight", input.weight_Sh, rows, heads);
  if (input.past_key_Nd.defined()) want("past key", input.past_key_Nd, past_tokens(input), d);
  const auto dtype = input.weight_Sh.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble) fail(std::string("weight is ") + c10::toString(dtype) + ", wanted a wide dtype");
  if (input.top_k < 1) fail("top_k is " + std::to_string(input.top_k) + ", wanted at least 1");
  check_spans(input.spans, rows);
  if (past_tokens(input) + rows > std::numeric_limits<int32_t>::max()) fail("more than 2^31 - 1 positions");
}

// The best keys so far of a tile of queries, positions rising along a row.
struct Best {
  at::Tensor score_QK;     // -inf for a key that the query doesn't see
  at::Tensor position_QK;  // int32
};

// The k largest of each row, of equal ones the first, in the order they stand in: exactly k, whatever the ties.
void keep_largest(Best& best, int64_t k) {
  const int64_t rows = best.score_QK.size(0);
  if (best.score_QK.size(1) <= k) return;
  const at::Tensor least_Q1 = std::get<0>(best.score_QK.topk(k, -1, /*largest=*/true, /*sorted=*/false)).amin(-1, /*keepdim=*/true);
  at::Tensor keep = best.score_QK.gt(least_Q1), equal = best.score_QK.eq(least_Q1);
  const at::Tensor room_Q1 = k - keep.sum(-1, /*keepdim=*/true, at::kInt);
  equal.logical_and_(equal.to(at::kInt).cumsum_(-1).le(room_Q1));
  keep.logical_or_(equal);
  best = {best.score_QK.masked_select(keep).view({rows, k}), best.position_QK.masked_select(keep).view({rows, k})};
}

void append(Best& best, const at::Tensor& score_QB, int64_t first_position, int64_t k) {
  const at::Tensor position_QB =
      at::arange(first_position, first_position + score_QB.size(1), score_QB.options().dtype(at::kInt)).expand(score_QB.sizes());
  if (!best.score_QK.defined()) {
    best = {score_QB, position_QB};
  } else {
    best = {at::cat({best.score_QK, score_QB}, 1), at::cat({best.position_QK, position_QB}, 1)};
  }
  keep_largest(best, k);
}

Best rows_of(const Best& best, int64_t begin, int64_t count) {
  if (!best.score_QK.defined()) return {};
  return {best.score_QK.narrow(0, begin, count), best.position_QK.narrow(0, begin, count)};
}

// The queries of a tile in wide dtype, ready for products with keys.
struct Scorer {
  at::Tensor query_Qhd, weight_Qh;
  int64_t heads_at_once;

  at::Tensor score_QB(const at::Tensor& key_Bd) const {
    const int64_t queries = query_Qhd.size(0), heads = query_Qhd.size(1), keys = key_Bd.size(0);
    const at::Tensor key_dB = key_Bd.to(weight_Qh.scalar_type()).t();
    at::Tensor sum_QB = at::zeros({queries, keys}, weight_Qh.options());
    for (int64_t first = 0; first < heads; first += heads_at_once) {
      const int64_t n = std::min(heads_at_once, heads - first);
      const at::Tensor product =
          at::mm(query_Qhd.narrow(1, first, n).reshape({queries * n, -1}), key_dB).relu_().view({queries, n, keys});
      // One head after the other: the order of the sum doesn't depend on how many heads one product holds.
      for (int64_t h = 0; h < n; ++h) sum_QB.addcmul_(product.select(1, h), weight_Qh.narrow(1, first + h, 1));
    }
    const double infinity = std::numeric_limits<double>::infinity();
    return sum_QB.nan_to_num_(infinity, infinity, -infinity);
  }
};

// Keys of the span itself, up to the last of the queries [begin, end), which stand in it.
void append_own(Best& best, const Scorer& scorer, const at::Tensor& own_key_Sd, const Span& span, int64_t begin, int64_t end,
                int64_t past, const SelectionInput& input, int64_t key_block) {
  for (int64_t key = span.begin; key < end; key += key_block) {
    const int64_t keys = std::min(key_block, end - key);
    at::Tensor score_QB = scorer.score_QB(own_key_Sd.narrow(0, key, keys));
    if (key + keys - 1 > begin) {  // the first query doesn't see the last key
      const auto ids = score_QB.options().dtype(at::kLong);
      const at::Tensor hidden = at::arange(key, key + keys, ids).unsqueeze(0).gt(at::arange(begin, end, ids).unsqueeze(1));
      score_QB.masked_fill_(hidden, -std::numeric_limits<double>::infinity());
    }
    append(best, score_QB, past + key - span.begin, input.top_k);
  }
}

void select_tile(const SelectionInput& input, const Cut& cut, int64_t begin, int64_t end, at::Tensor& positions_SK) {
  const int64_t past = past_tokens(input);
  const auto scorer = [&](int64_t first, int64_t last) {
    return Scorer{input.query_Shd.narrow(0, first, last - first).to(input.weight_Sh.scalar_type()),
                  input.weight_Sh.narrow(0, first, last - first), cut.heads};
  };
  Best of_past;
  const Scorer tile = scorer(begin, end);
  for (int64_t key = 0; key < past; key += cut.key_block) {
    append(of_past, tile.score_QB(input.past_key_Nd.narrow(0, key, std::min(cut.key_block, past - key))), key, input.top_k);
  }
  for (const Span& span : input.spans) {
    const int64_t first = std::max(begin, span.begin), last = std::min(end, span.end);
    if (first >= last) continue;
    Best best = rows_of(of_past, first - begin, last - first);
    append_own(best, scorer(first, last), input.own_key_Sd, span, first, last, past, input, cut.key_block);
    // Keys that a query doesn't see come after all that it sees: of equal scores (-inf) the seen ones were kept.
    const auto ids = best.position_QK.options();
    const at::Tensor own_position_Q1 = at::arange(past + first - span.begin, past + last - span.begin, ids).unsqueeze(1);
    positions_SK.narrow(0, first, last - first)
        .narrow(1, 0, best.position_QK.size(1))
        .copy_(best.position_QK.masked_fill(best.position_QK.gt(own_position_Q1), -1));
  }
}

}  // namespace

void check_spans(const std::vector<Span>& spans, int64_t rows) {
  int64_t next = 0;
  for (const Span& span : spans) {
    if (span.begin != next || span.end <= span.begin) {
      throw ConfigError("span [" + std::to_string(span.begin) + ", " + std::to_string(span.end) + "): wanted one that begins at " +
                        std::to_string(next) + " and isn't empty");
    }
    next = span.end;
  }
  if (next != rows) throw ConfigError("spans cover " + std::to_string(next) + " rows, wanted " + std::to_string(rows));
}

at::Tensor select_top_keys(const SelectionInput& input, const SelectionTiling& tiling) {
  check(input);
  const at::NoGradGuard no_grad;
  const SelectionSize size = size_of(input);
  const int64_t rows = size.rows, width = std::min(size.top_k, size.keys);
  at::Tensor positions_SK = at::full({rows, width}, -1, input.query_Shd.options().dtype(at::kInt).requires_grad(false));
  const Cut cut = make_cut(size, tiling);
  for (int64_t begin = 0; begin < rows; begin += cut.query_tile) {
    select_tile(input, cut, begin, std::min(begin + cut.query_tile, rows), positions_SK);
  }
  return positions_SK;
}

int64_t selection_bytes(const SelectionSize& size) {
  const Cut cut = make_cut(size, {});
  const at::ScalarType wide = size.dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto high = static_cast<int64_t>(c10::elementSize(wide));
  const int64_t queries = std::min(cut.query_tile, size.rows), block = std::min(cut.key_block, size.keys);
  const int64_t best = std::min(size.top_k, size.keys), merged = std::min(best + block, size.keys);
  const int64_t pair = high + 4;  // a score and its position
  const int64_t converted = size.dtype == wide ? 0 : block * size.head_dim * high;
  const int64_t scoring = queries * (best * pair + (cut.heads + 1) * block * high + cut.heads * size.head_dim * high) + converted;
  // Merging: the block's scores, all candidates and two masks; then the candidates kept and, of each candidate, one number
  // (with several threads two) with which LibTorch finds where it goes: more than the count among equal ones before.
  const int64_t select = best * pair + (at::get_num_threads() > 1 ? 16 : 8) * merged;
  const bool merges = merged > best;
  const int64_t merging = merges ? queries * (block * high + merged * (pair + 2) + select) : 0;
  const int64_t wide_queries = size.dtype == wide ? 0 : queries * size.heads * size.head_dim * high;
  return wide_queries + std::max(scoring, merging);
}

uint64_t selection_hash(const at::Tensor& positions_SK) {
  const at::Tensor plain = positions_SK.to(at::kCPU, at::kInt).contiguous();
  const auto columns = static_cast<XXH64_hash_t>(plain.dim() == 0 ? 1 : plain.size(-1));
  return XXH3_64bits_withSeed(plain.data_ptr<int32_t>(), static_cast<size_t>(plain.nbytes()), columns);
}

}  // namespace longstraw
