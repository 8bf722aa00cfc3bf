#include "longstraw/prefix_attention.h"

#include "longstraw/attention_block.h"
#include "longstraw/autograd_node.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace longstraw {
namespace {

using core::model::AttentionSpec;

// One call of attend_block: rows of the queries against a range of keys, either rows of the tokens' own or positions
// of the past.
struct Piece {
  int64_t query_begin = 0, queries = 0;
  int64_t key_begin = 0, keys = 0;
  BlockMask mask;
};

struct Pieces {
  std::vector<Piece> own;  // cover every row exactly once, in order
  std::vector<Piece> past;
};

std::vector<Span> window_tiles(const Span& span, const std::optional<int64_t>& window) {
  if (!window || *window >= span.end - span.begin) return {span};
  std::vector<Span> tiles;
  for (int64_t begin = span.begin; begin < span.end; begin += kWindowTile) {
    tiles.push_back({begin, std::min(begin + kWindowTile, span.end)});
  }
  return tiles;
}

void add_past_pieces(std::vector<Piece>& pieces, const Span& rows, int64_t first_position, const Past& past,
                     const std::optional<int64_t>& window) {
  const int64_t queries = rows.end - rows.begin;
  const int64_t first_key = window ? std::max<int64_t>(0, first_position - *window + 1) : 0;
  // The window hides nothing of the past if the last query still sees the first key.
  const bool hides = window && first_position + queries - 1 - *window >= 0;
  int64_t begin = first_key;
  while (begin < past.tokens) {
    int64_t end = std::min(begin + kPastBlock, past.tokens);
    if (begin < past.adjoint_from) end = std::min(end, past.adjoint_from);  // no piece is half wanted
    BlockMask mask{.all = true, .first_query = first_position, .first_key = begin};
    if (hides) mask.window = window;
    pieces.push_back({rows.begin, queries, begin, end - begin, mask});
    begin = end;
  }
}

Pieces cut_into_pieces(const std::optional<int64_t>& window, const std::vector<Span>& spans, const Past& past) {
  Pieces pieces;
  for (const Span& span : spans) {
    for (const Span& tile : window_tiles(span, window)) {
      const int64_t first_key = window ? std::max(span.begin, tile.begin - *window + 1) : span.begin;
      BlockMask mask{.all = false, .first_query = tile.begin, .first_key = first_key, .window = window};
      pieces.own.push_back({tile.begin, tile.end - tile.begin, first_key, tile.end - first_key, mask});
      if (window) add_past_pieces(pieces.past, tile, past.tokens + tile.begin - span.begin, past, window);
    }
  }
  // Without a window every row sees the whole past: all spans at once.
  if (!window) add_past_pieces(pieces.past, {spans.front().begin, spans.back().end}, past.tokens, past, window);
  return pieces;
}

PartialAttention attend_own(const std::vector<Piece>& pieces, const at::Tensor& query_HSd, const at::Tensor& key_GSd,
                            const at::Tensor& value_GSd, double scale) {
  std::vector<at::Tensor> outs, lses;
  for (const Piece& piece : pieces) {
    auto part = attend_block(query_HSd.narrow(1, piece.query_begin, piece.queries), key_GSd.narrow(1, piece.key_begin, piece.keys),
                             value_GSd.narrow(1, piece.key_begin, piece.keys), scale, piece.mask);
    outs.push_back(part.out_HTd.transpose(0, 1));
    lses.push_back(part.lse_HT);
  }
  if (pieces.size() == 1) return {outs[0].transpose(0, 1), lses[0]};
  return {at::cat(outs, 0).transpose(0, 1), at::cat(lses, 1)};
}

void merge_past(PartialAttention& merged, const Piece& piece, const PartialAttention& part) {
  if (piece.queries == merged.lse_HT.size(1)) {
    merge_partial(merged, part);
    return;
  }
  if (merged.out_HTd.scalar_type() != merged.lse_HT.scalar_type()) merged.out_HTd = merged.out_HTd.to(merged.lse_HT.scalar_type());
  PartialAttention rows{merged.out_HTd.narrow(1, piece.query_begin, piece.queries),
                        merged.lse_HT.narrow(1, piece.query_begin, piece.queries)};
  const PartialAttention target = rows;
  merge_partial(rows, part);
  target.out_HTd.copy_(rows.out_HTd);
  target.lse_HT.copy_(rows.lse_HT);
}

// The values of past positions and their adjoint: rows of their own, or the first columns of the keys.
at::Tensor value_part(const at::Tensor& keys, int64_t width) { return keys.narrow(2, 0, width); }
bool has_own_values(const Past& past, int64_t slot) { return past.state->kinds_of_rows(slot) > 1; }

at::Tensor past_values(const Past& past, int64_t slot, const Piece& piece, const at::Tensor& keys, int64_t width) {
  return has_own_values(past, slot) ? past.state->rows(slot, 1, piece.key_begin, piece.keys) : value_part(keys, width);
}
at::Tensor past_value_adjoint(const Past& past, int64_t slot, const Piece& piece, const at::Tensor& key_adjoint, int64_t width) {
  return has_own_values(past, slot) ? past.state->rows_adjoint(slot, 1, piece.key_begin, piece.keys)
                                    : value_part(key_adjoint, width);
}

// All that the backward pass needs; tensors are detached.
struct Saved {
  AttentionSpec spec;
  at::Tensor query_HSd, key_GSd, value_GSd;
  PartialAttention merged;
  Past past;
  Pieces pieces;
};

void add_rows(at::Tensor& sum, bool whole, const at::Tensor& shape_of, int64_t begin, const at::Tensor& part) {
  if (whole && !sum.defined()) {
    sum = part;
    return;
  }
  if (!sum.defined()) sum = at::zeros(shape_of.sizes(), shape_of.options());
  sum.narrow(1, begin, part.size(1)).add_(part);
}

std::vector<at::Tensor> attention_backward(const Saved& saved, const at::Tensor& grad_SHd) {
  const at::Tensor grad_HSd = grad_SHd.transpose(0, 1);
  at::Tensor dq, dk, dv;
  const auto run = [&](const Piece& piece, const at::Tensor& keys, const at::Tensor& values, bool want) {
    const PartialAttention merged{saved.merged.out_HTd.narrow(1, piece.query_begin, piece.queries),
                                  saved.merged.lse_HT.narrow(1, piece.query_begin, piece.queries)};
    auto grads = attend_block_backward(grad_HSd.narrow(1, piece.query_begin, piece.queries),
                                       saved.query_HSd.narrow(1, piece.query_begin, piece.queries), keys, values, merged,
                                       saved.spec.scale, piece.mask, want);
    add_rows(dq, piece.queries == saved.query_HSd.size(1), saved.query_HSd, piece.query_begin, grads.query_HTd);
    return grads;
  };
  for (const Piece& piece : saved.pieces.own) {
    const auto grads = run(piece, saved.key_GSd.narrow(1, piece.key_begin, piece.keys),
                           saved.value_GSd.narrow(1, piece.key_begin, piece.keys), true);
    const bool whole = saved.pieces.own.size() == 1;
    add_rows(dk, whole, saved.key_GSd, piece.key_begin, grads.key_GNd);
    add_rows(dv, whole, saved.value_GSd, piece.key_begin, grads.value_GNd);
  }
  const int64_t slot = saved.spec.slot, width = saved.value_GSd.size(2);
  for (const Piece& piece : saved.pieces.past) {
    const bool want = piece.key_begin >= saved.past.adjoint_from;
    const at::Tensor keys = saved.past.state->rows(slot, 0, piece.key_begin, piece.keys);
    const auto grads = run(piece, keys, past_values(saved.past, slot, piece, keys, width), want);
    if (!want) continue;
    const at::Tensor key_adjoint = saved.past.state->rows_adjoint(slot, 0, piece.key_begin, piece.keys);
    key_adjoint.add_(grads.key_GNd);
    past_value_adjoint(saved.past, slot, piece, key_adjoint, width).add_(grads.value_GNd);
  }
  return {dq.transpose(0, 1), dk.to(saved.key_GSd.scalar_type()).transpose(0, 1),
          dv.to(saved.value_GSd.scalar_type()).transpose(0, 1)};
}

}  // namespace

at::Tensor prefix_attention(const AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                            const at::Tensor& value_SGd, const std::vector<Span>& spans, const Past& past) {
  Saved saved{
      spec, query_SHd.detach().transpose(0, 1),       key_SGd.detach().transpose(0, 1), value_SGd.detach().transpose(0, 1), {},
      past, cut_into_pieces(spec.window, spans, past)};
  {
    at::NoGradGuard no_grad;
    saved.merged = attend_own(saved.pieces.own, saved.query_HSd, saved.key_GSd, saved.value_GSd, spec.scale);
    for (const Piece& piece : saved.pieces.past) {
      const at::Tensor keys = past.state->rows(spec.slot, 0, piece.key_begin, piece.keys);
      merge_past(saved.merged, piece,
                 attend_block(saved.query_HSd.narrow(1, piece.query_begin, piece.queries), keys,
                              past_values(past, spec.slot, piece, keys, value_SGd.size(2)), spec.scale, piece.mask));
    }
    saved.merged.out_HTd = saved.merged.out_HTd.to(query_SHd.scalar_type());
  }
  const at::Tensor out_SHd = saved.merged.out_HTd.transpose(0, 1);
  return differentiable(out_SHd, {query_SHd, key_SGd, value_SGd},
                        [saved = std::move(saved)](const at::Tensor& grad) { return attention_backward(saved, grad); });
}

}  // namespace longstraw
