#pragma once
// The choice of keys in sparse attention (DeepSeek-V3.2's indexer): for query t the top_k visible keys s with the largest
//
//   score(t, s) = Σ_h weight_{t,h} · relu(query_{t,h} · key_s)
//
// and of equal scores those that come first, exactly, however the keys are cut into blocks. The relu makes scores of
// exactly 0 common, so the rule matters: without it a recomputed segment could attend to other keys than the captured one.
// A score that is not a number counts as the largest, so that a fault stays visible.
//
// Scores are computed in float32 (float64 if the weights are), block by block with a running best top_k: memory is
// O(tile of queries · (block + top_k)), whatever the number of keys. The same inputs with the same options give the same
// bits on one device and thread count; another key_block may round a score otherwise in its last bit, as any matrix product
// of another shape may, and so decide otherwise between two scores that differ by no more.
//
// Shapes: S tokens run together, h index heads, d their size, N tokens of the past, K = min(top_k, N + longest span).

#include "longstraw/prefix_attention.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace longstraw {

struct SelectionInput {
  at::Tensor query_Shd;
  at::Tensor own_key_Sd;    // dtype of the query or another: converted block by block
  at::Tensor past_key_Nd;   // undefined: no past
  at::Tensor weight_Sh;     // float32 or float64, already times every scale
  std::vector<Span> spans;  // in order, covering all S rows; each sees the past and itself, causally
  int64_t top_k = 0;
};

// How the work is cut; 0: chosen by the device.
struct SelectionTiling {
  int64_t key_block = 0;
  int64_t query_tile = 0;
};

// int32 [S, K]: a row holds positions in its span's own sequence in rising order: p < N is row p of the past, N + r the
// r-th token of the span. Behind them -1 where a token sees fewer than K keys. Throws ConfigError if shapes, dtypes or
// spans don't fit together.
at::Tensor select_top_keys(const SelectionInput& input, const SelectionTiling& tiling = {});

struct SelectionSize {
  int64_t rows = 0;      // S
  int64_t heads = 0;     // h
  int64_t head_dim = 0;  // d
  int64_t keys = 0;      // N + longest span
  int64_t top_k = 0;
  c10::ScalarType dtype = c10::kFloat;  // of queries and keys; weights are wide
  c10::DeviceType device = c10::kCPU;
};
// Bytes that a call with the device's own tiling holds at once beside its inputs and its result, of a long past; of a short one
// at most.
int64_t selection_bytes(const SelectionSize& size);

// A number that two selections share only if they are equal (xxHash, 64 bits), from any device: kept of each captured
// segment, it tells whether its recompute chose otherwise.
uint64_t selection_hash(const at::Tensor& positions_SK);

// Throws ConfigError unless the spans cover rows 0 … rows-1 in order, none of them empty.
void check_spans(const std::vector<Span>& spans, int64_t rows);

}  // namespace longstraw
