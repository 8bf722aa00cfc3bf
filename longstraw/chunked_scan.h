#pragma once
// What the chunked forms of the delta rule and of Mamba-2 share: how the work is cut, how a piece of a tensor is laid out
// for matrix products, and the decays between the tokens of a chunk.
//
// The heads of a *group* share two matrices of keys (delta rule: query and key; Mamba-2: c and b), so their states lie side by
// side in one matrix [k, r·v] and one product serves them all. A *slice* is a range of sequences times a range of groups; slices
// don't depend on each other and go to different threads. A slice is walked in *blocks* of a few chunks, so that what is
// computed on the way stays in cache and small beside inputs and outputs.
//
// Letters of shapes: N sequences, T tokens, G groups, H = G·r heads; B = sequences × groups of a slice; m chunks of a block,
// c tokens of a chunk; k rows of the state (size of a key), v columns a head.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace longstraw {

struct ScanShape {
  int64_t sequences = 0;   // N
  int64_t tokens = 0;      // T
  int64_t groups = 0;      // G
  int64_t repeat = 0;      // r
  int64_t key_size = 0;    // k
  int64_t value_size = 0;  // v
  int64_t heads() const { return groups * repeat; }
};

struct ScanSlice {
  int64_t first_sequence = 0, sequences = 0;
  int64_t first_group = 0, groups = 0;
  int64_t tokens = 0;            // of its longest sequence
  std::vector<int64_t> lengths;  // of its sequences; empty where all have `tokens`
  int64_t batch() const { return sequences * groups; }
};

struct ScanBlock {
  int64_t index = 0;  // in its slice
  int64_t begin = 0;  // first token
  int64_t chunks = 0;
  int64_t chunk = 0;  // tokens of each; the rest of a sequence that fills no chunk is a block of its own
  int64_t tokens() const { return chunks * chunk; }
};

class ScanPlan {
 public:
  // `lengths` empty: all of T each. Throws ConfigError (naming `what`) if they don't fit, or for a chunk below 1.
  ScanPlan(const char* what, const ScanShape& shape, const std::vector<int64_t>& lengths, int64_t chunk, at::Device device);

  const ScanShape& shape() const { return shape_; }
  const std::vector<ScanSlice>& slices() const { return slices_; }
  std::vector<ScanBlock> blocks(const ScanSlice& slice) const;
  // [blocks, N, G, k, r·v], uninitialised: the state at the start of each block.
  at::Tensor make_block_states(const at::TensorOptions& options) const;
  at::Tensor block_state(const at::Tensor& states, const ScanSlice& slice, const ScanBlock& block) const;  // view [1, n, g, k, r·v]

  // Calls `work` for each slice, without autograd, on several threads where there are slices enough. Which slice a call gets
  // never changes its result.
  void for_each_slice(const std::function<void(const ScanSlice&)>& work) const;
  // x_NT… of rows that aren't real becomes 0.
  void clear_padding(const at::Tensor& x_NT) const;

 private:
  ScanShape shape_;
  std::vector<int64_t> lengths_;
  int64_t chunk_ = 0;
  int64_t chunks_per_block_ = 0;
  int64_t most_blocks_ = 0;
  bool on_cpu_ = true;
  std::vector<ScanSlice> slices_;
};

// The part of a tensor that a slice needs of one block, as a view to read or to write.
at::Tensor group_view(const at::Tensor& x_NTGd, const ScanSlice& slice, const ScanBlock& block);  // [m, n, g, c, d]
at::Tensor head_view(const at::Tensor& x_NTHv, const ScanSlice& slice, const ScanBlock& block,
                     int64_t repeat);  // [m, n, g, r, c, v]
at::Tensor scalar_view(const at::Tensor& x_NTH, const ScanSlice& slice, const ScanBlock& block, int64_t repeat);  // [m, n, g, r, c]
// [m, B, ...] of such a view in the given dtype, contiguous and always a copy, and back.
at::Tensor gather(const at::Tensor& view, at::ScalarType dtype);
void scatter(const at::Tensor& view, const at::Tensor& x_mB);
// Copies with 0 for tokens that aren't real, so that they neither decay the state nor add to it, nor overflow a product that is
// then multiplied by 0: [m, B, r, c], [m, B, r, c, v], [m, B, c, d].
at::Tensor gather_scalars(const at::Tensor& x_NTH, const ScanSlice& slice, const ScanBlock& block, int64_t repeat,
                          at::ScalarType dtype);
at::Tensor gather_heads(const at::Tensor& x_NTHv, const ScanSlice& slice, const ScanBlock& block, int64_t repeat,
                        at::ScalarType dtype);
at::Tensor gather_groups(const at::Tensor& x_NTGd, const ScanSlice& slice, const ScanBlock& block, at::ScalarType dtype);

// state [N or 1, H, k, v] (or undefined: zeros) of a slice as a fresh [B, k, r·v], and back.
at::Tensor gather_state(const at::Tensor& state_NHkv, const ScanSlice& slice, const ScanShape& shape,
                        const at::TensorOptions& wide);
void scatter_state(const at::Tensor& state_NHkv, const ScanSlice& slice, const at::Tensor& state_Bkrv);

// Decays inside each chunk, from log decays g <= 0 [m, B, r, c]. The running sums are taken in float64: their differences
// matter, and under strong decay they are far smaller than the sums.
struct Decays {
  at::Tensor from_start_mBrc;  // e^{G_i}
  at::Tensor to_end_mBrc;      // e^{G_c − G_i}
  at::Tensor whole_mBr;        // e^{G_c}
  at::Tensor between_mBrcc;    // e^{G_i − G_j} for i >= j, else 0
};
Decays decays(const at::Tensor& log_decay_mBrc);

// Gradient of the log decays g_k of a chunk, from what each decay that spans token k contributes: `pairs` = of log Γ_ij (only
// i > j is read), `from_start` = of log e^{G_i}, `to_end` = of log e^{G_c − G_i}, `whole` = of log e^{G_c}:
//
//   dg_k = Σ_{i >= k > j} pairs_ij + Σ_{i >= k} from_start_i + Σ_{i < k} to_end_i + whole
//
// Going by the running sums, dG first and then its sum from the end, would add each pair twice with opposite signs: under
// strong decay their difference is all noise.
at::Tensor log_decay_gradient(const at::Tensor& pairs_mBrcc, const at::Tensor& from_start_mBrc, const at::Tensor& to_end_mBrc,
                              const at::Tensor& whole_mBr);

}  // namespace longstraw
