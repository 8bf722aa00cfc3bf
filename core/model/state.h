#pragma once
// What a decoder leaves behind for later tokens, described without tensors: one MixerState a token mixer, in the order of
// the layers. The position of a MixerState in Decoder::states() is its *slot*: the name by which operations refer to it.

#include "core/model/safetensors.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::model {

// One row for every token: grows with the prompt. In the model's dtype.
struct TokenRows {
  std::string name;  // "key", "value", "latent"
  int64_t heads = 1;
  int64_t width = 0;
  bool adjoint = true;  // false: no gradient flows into it (the keys of a sparse indexer)
};

// One value for all tokens so far: replaced by every token. Starts as zeros.
struct Carried {
  std::string name;  // "convolution", "recurrent"
  Shape shape;
  bool wide = false;  // float32 (float64 in a float64 run) whatever the model's dtype
};

struct MixerState {
  int64_t layer = 0;
  std::string kind;               // "full attention", "gated delta rule"; what `inspect` groups by
  std::optional<int64_t> window;  // rows older than this are never read again
  std::vector<TokenRows> rows;
  std::vector<Carried> carried;
};

}  // namespace longstraw::core::model
