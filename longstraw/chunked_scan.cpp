#include "longstraw/chunked_scan.h"

#include "core/base/errors.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace longstraw {
namespace {

// Elements of one [m, B, c, r·v] tensor of a block. On CPU about ten of them should stay in a core's cache; a GPU needs
// many more to be busy.
constexpr int64_t kCpuElements = int64_t{1} << 15;
constexpr int64_t kDeviceElements = int64_t{1} << 23;
constexpr int64_t kMostChunks = 16;

at::Tensor tokens_of(const at::Tensor& x_NT, const ScanSlice& slice, const ScanBlock& block) {
  return x_NT.narrow(0, slice.first_sequence, slice.sequences).narrow(1, block.begin, block.tokens());
}

// True for tokens of the block that aren't real: [m, n, 1, 1, c]; undefined where all are.
at::Tensor padding(const ScanSlice& slice, const ScanBlock& block, at::Device device) {
  const auto ends = [&](int64_t length) { return length < block.begin + block.tokens(); };
  if (std::none_of(slice.lengths.begin(), slice.lengths.end(), ends)) return {};
  const at::Tensor length_n = at::tensor(slice.lengths, at::kLong).to(device).view({1, -1, 1, 1, 1});
  const at::Tensor token = at::arange(block.begin, block.begin + block.tokens(), at::TensorOptions(at::kLong).device(device));
  return token.view({block.chunks, 1, 1, 1, block.chunk}).ge(length_n);
}

}  // namespace

ScanPlan::ScanPlan(const char* what, const ScanShape& shape, const std::vector<int64_t>& lengths, int64_t chunk, at::Device device)
    : shape_(shape), lengths_(lengths), chunk_(chunk), on_cpu_(device.is_cpu()) {
  if (chunk < 1) throw ConfigError(fmt::format("{}: chunk {}, expected at least 1", what, chunk));
  if (!lengths.empty() && int64_t(lengths.size()) != shape.sequences) {
    throw ConfigError(fmt::format("{}: {} lengths for {} sequences", what, lengths.size(), shape.sequences));
  }
  for (const int64_t length : lengths) {
    if (length < 0 || length > shape.tokens) {
      throw ConfigError(fmt::format("{}: length {} of a sequence, expected 0 to {}", what, length, shape.tokens));
    }
  }
  if (lengths_.empty()) lengths_.assign(size_t(shape.sequences), shape.tokens);

  const int64_t budget = on_cpu_ ? kCpuElements : kDeviceElements;
  const int64_t one = std::max<int64_t>(1, std::min(chunk, shape.tokens) * shape.repeat * shape.value_size);
  int64_t batch = std::max<int64_t>(1, budget / one);
  if (on_cpu_) batch = std::min(batch, std::max<int64_t>(1, shape.sequences * shape.groups / at::get_num_threads()));
  const int64_t groups = std::min(batch, shape.groups), sequences = std::max<int64_t>(1, batch / std::max<int64_t>(1, groups));
  chunks_per_block_ = std::clamp<int64_t>(budget / (one * groups * std::min(sequences, shape.sequences)), 1, kMostChunks);

  for (int64_t n = 0; n < shape.sequences; n += sequences) {
    ScanSlice slice{.first_sequence = n, .sequences = std::min(sequences, shape.sequences - n)};
    slice.lengths.assign(lengths_.begin() + n, lengths_.begin() + n + slice.sequences);
    const auto [least, most] = std::minmax_element(slice.lengths.begin(), slice.lengths.end());
    slice.tokens = *most;
    if (*least == *most) slice.lengths.clear();
    for (int64_t g = 0; g < shape.groups; g += groups) {
      slice.first_group = g;
      slice.groups = std::min(groups, shape.groups - g);
      most_blocks_ = std::max(most_blocks_, int64_t(blocks(slice).size()));
      slices_.push_back(slice);
    }
  }
}

std::vector<ScanBlock> ScanPlan::blocks(const ScanSlice& slice) const {
  std::vector<ScanBlock> all;
  const int64_t full = slice.tokens / chunk_;
  for (int64_t first = 0; first < full; first += chunks_per_block_) {
    all.push_back({int64_t(all.size()), first * chunk_, std::min(chunks_per_block_, full - first), chunk_});
  }
  if (slice.tokens % chunk_ != 0) all.push_back({int64_t(all.size()), full * chunk_, 1, slice.tokens % chunk_});
  return all;
}

at::Tensor ScanPlan::make_block_states(const at::TensorOptions& options) const {
  return at::empty({most_blocks_, shape_.sequences, shape_.groups, shape_.key_size, shape_.repeat * shape_.value_size}, options);
}

at::Tensor ScanPlan::block_state(const at::Tensor& states, const ScanSlice& slice, const ScanBlock& block) const {
  return states.narrow(0, block.index, 1)
      .narrow(1, slice.first_sequence, slice.sequences)
      .narrow(2, slice.first_group, slice.groups);
}

void ScanPlan::for_each_slice(const std::function<void(const ScanSlice&)>& work) const {
  const int64_t count = int64_t(slices_.size());
  const auto run = [&](int64_t begin, int64_t end) {
    // A thread of the pool does not know the caller's modes. Below autograd altogether: half the cost of a small operation
    // is its bookkeeping.
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    for (int64_t i = begin; i < end; ++i) work(slices_[size_t(i)]);
  };
  // Fewer slices than threads: one after another, each operation on all threads.
  if (on_cpu_ && count >= at::get_num_threads() && count > 1) {
    at::parallel_for(0, count, /*grain_size=*/1, run);
  } else {
    run(0, count);
  }
}

void ScanPlan::clear_padding(const at::Tensor& x_NT) const {
  const at::NoGradGuard no_grad;
  for (int64_t n = 0; n < shape_.sequences; ++n) {
    const int64_t length = lengths_[size_t(n)];
    if (length < shape_.tokens) x_NT.select(0, n).narrow(0, length, shape_.tokens - length).zero_();
  }
}

at::Tensor group_view(const at::Tensor& x_NTGd, const ScanSlice& slice, const ScanBlock& block) {
  return tokens_of(x_NTGd, slice, block)
      .narrow(2, slice.first_group, slice.groups)
      .unflatten(1, {block.chunks, block.chunk})
      .permute({1, 0, 3, 2, 4});
}

at::Tensor head_view(const at::Tensor& x_NTHv, const ScanSlice& slice, const ScanBlock& block, int64_t repeat) {
  return tokens_of(x_NTHv, slice, block)
      .narrow(2, slice.first_group * repeat, slice.groups * repeat)
      .unflatten(2, {slice.groups, repeat})
      .unflatten(1, {block.chunks, block.chunk})
      .permute({1, 0, 3, 4, 2, 5});
}

at::Tensor scalar_view(const at::Tensor& x_NTH, const ScanSlice& slice, const ScanBlock& block, int64_t repeat) {
  return head_view(x_NTH.unsqueeze(-1), slice, block, repeat).squeeze(-1);
}

at::Tensor gather(const at::Tensor& view, at::ScalarType dtype) {
  return at::empty(view.sizes(), view.options().dtype(dtype)).copy_(view).flatten(1, 2);
}

void scatter(const at::Tensor& view, const at::Tensor& x_mB) { view.copy_(x_mB.unflatten(1, {view.size(1), view.size(2)})); }

at::Tensor gather_scalars(const at::Tensor& x_NTH, const ScanSlice& slice, const ScanBlock& block, int64_t repeat,
                          at::ScalarType dtype) {
  return gather_heads(x_NTH.unsqueeze(-1), slice, block, repeat, dtype).squeeze(-1);
}

at::Tensor gather_heads(const at::Tensor& x_NTHv, const ScanSlice& slice, const ScanBlock& block, int64_t repeat,
                        at::ScalarType dtype) {
  at::Tensor x = gather(head_view(x_NTHv, slice, block, repeat), dtype);
  if (const at::Tensor pad = padding(slice, block, x.device()); pad.defined()) {
    x.unflatten(1, {slice.sequences, slice.groups}).masked_fill_(pad.unsqueeze(-1), 0.0);
  }
  return x;
}

at::Tensor gather_groups(const at::Tensor& x_NTGd, const ScanSlice& slice, const ScanBlock& block, at::ScalarType dtype) {
  return gather_heads(x_NTGd, slice, block, 1, dtype).squeeze(2);
}

at::Tensor gather_state(const at::Tensor& state_NHkv, const ScanSlice& slice, const ScanShape& shape,
                        const at::TensorOptions& wide) {
  const int64_t columns = shape.repeat * shape.value_size;
  if (!state_NHkv.defined()) return at::zeros({slice.batch(), shape.key_size, columns}, wide);
  const at::Tensor state = state_NHkv.size(0) == shape.sequences ? state_NHkv.narrow(0, slice.first_sequence, slice.sequences)
                                                                 : state_NHkv.expand({slice.sequences, -1, -1, -1});
  const at::Tensor view = state.narrow(1, slice.first_group * shape.repeat, slice.groups * shape.repeat)
                              .unflatten(1, {slice.groups, shape.repeat})
                              .permute({0, 1, 3, 2, 4});
  at::Tensor own = at::empty({slice.sequences, slice.groups, shape.key_size, shape.repeat, shape.value_size}, wide);
  own.copy_(view);  // always a copy: the scan writes into it
  return own.view({slice.batch(), shape.key_size, columns});
}

void scatter_state(const at::Tensor& state_NHkv, const ScanSlice& slice, const at::Tensor& state_Bkrv) {
  const int64_t repeat = state_Bkrv.size(2) / state_NHkv.size(3);
  const at::Tensor view = state_NHkv.narrow(0, slice.first_sequence, slice.sequences)
                              .narrow(1, slice.first_group * repeat, slice.groups * repeat)
                              .unflatten(1, {slice.groups, repeat})
                              .permute({0, 1, 3, 2, 4});
  view.copy_(state_Bkrv.view(view.sizes()));
}

Decays decays(const at::Tensor& log_decay_mBrc) {
  const auto dtype = log_decay_mBrc.scalar_type();
  const int64_t c = log_decay_mBrc.size(-1);
  const at::Tensor sum = log_decay_mBrc.cumsum(-1, at::kDouble);
  const at::Tensor last = sum.narrow(-1, c - 1, 1);
  const at::Tensor future = at::ones({c, c}, log_decay_mBrc.options().dtype(at::kBool)).triu_(1);
  // Masked before the exponential, which would overflow for pairs in the wrong order.
  at::Tensor between = (sum.unsqueeze(-1) - sum.unsqueeze(-2)).to(dtype);
  between.masked_fill_(future, -std::numeric_limits<double>::infinity()).exp_();
  return {sum.exp().to(dtype), (last - sum).exp_().to(dtype), last.squeeze(-1).exp().to(dtype), between};
}

at::Tensor log_decay_gradient(const at::Tensor& pairs_mBrcc, const at::Tensor& from_start_mBrc, const at::Tensor& to_end_mBrc,
                              const at::Tensor& whole_mBr) {
  const int64_t c = pairs_mBrcc.size(-1);
  const at::Tensor from_here = at::ones({c, c}, pairs_mBrcc.options()).triu_();
  at::Tensor grad = at::matmul(from_here, pairs_mBrcc).tril_(-1).sum(-1);
  grad.add_(from_start_mBrc.flip(-1).cumsum(-1).flip(-1)).add_(whole_mBr.unsqueeze(-1));
  grad.narrow(-1, 1, c - 1).add_(to_end_mBrc.narrow(-1, 0, c - 1).cumsum(-1));
  return grad;
}

}  // namespace longstraw
