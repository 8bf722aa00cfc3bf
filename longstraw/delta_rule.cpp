#include "longstraw/delta_rule.h"

#include "longstraw/chunked_scan.h"

#include "core/base/errors.h"
#include "core/device/device.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

namespace longstraw {
namespace {

using core::device::accumulation_dtype;

constexpr double kNormEps = 1e-6;

void check(bool good, const char* name, const at::Tensor& tensor, const std::string& wanted) {
  if (good) return;
  throw ConfigError(fmt::format("delta rule: {}: {} [{}], expected {}", name,
                                tensor.defined() ? toString(tensor.scalar_type()) : "none",
                                tensor.defined() ? fmt::format("{}", fmt::join(tensor.sizes(), ", ")) : "", wanted));
}

void check_shape(const char* name, const at::Tensor& tensor, at::ScalarType dtype, at::IntArrayRef shape) {
  check(tensor.defined() && tensor.sizes() == shape && tensor.scalar_type() == dtype, name, tensor,
        fmt::format("{} [{}]", toString(dtype), fmt::join(shape, ", ")));
}

ScanShape checked_shape(const DeltaRuleInput& in) {
  check(in.value_NTHv.defined() && in.value_NTHv.dim() == 4, "value", in.value_NTHv, "[N, T, H, dv]");
  const auto dtype = in.value_NTHv.scalar_type(), wide = accumulation_dtype(dtype);
  const int64_t N = in.value_NTHv.size(0), T = in.value_NTHv.size(1), H = in.value_NTHv.size(2), dv = in.value_NTHv.size(3);
  check(in.key_NTKd.defined() && in.key_NTKd.dim() == 4, "key", in.key_NTKd, "[N, T, K, dk]");
  const int64_t K = in.key_NTKd.size(2), dk = in.key_NTKd.size(3);
  check(K > 0 && H % K == 0, "key", in.key_NTKd, fmt::format("a number of heads that divides the {} value heads", H));
  check_shape("key", in.key_NTKd, dtype, {N, T, K, dk});
  check_shape("query", in.query_NTKd, dtype, {N, T, K, dk});
  check_shape("log_decay", in.log_decay_NTH, wide, {N, T, H});
  check_shape("beta", in.beta_NTH, wide, {N, T, H});
  if (in.state_NHkv.defined()) {
    check_shape("state", in.state_NHkv, wide, {in.state_NHkv.size(0) == 1 ? 1 : N, H, dk, dv});
  }
  return {.sequences = N, .tokens = T, .groups = K, .repeat = H / K, .key_size = dk, .value_size = dv};
}

// Inverse of I + A for the strictly lower triangles A of the last two dimensions; what stands elsewhere is not read.
template <class T>
void invert_unit_lower(const T* a, T* x, int64_t count, int64_t c) {
  for (int64_t matrix = 0; matrix < count; ++matrix, a += c * c, x += c * c) {
    for (int64_t i = 0; i < c; ++i) {
      T* row = x + i * c;
      std::fill(row, row + c, T(0));
      row[i] = T(1);
      for (int64_t j = 0; j < i; ++j) {
        const T factor = a[i * c + j];
        const T* earlier = x + j * c;
        for (int64_t n = 0; n <= j; ++n) row[n] -= factor * earlier[n];
      }
    }
  }
}

at::Tensor inverse_unit_lower(const at::Tensor& a) {
  const int64_t c = a.size(-1);
  if (!a.is_cpu()) {
    return at::linalg_solve_triangular(a, at::eye(c, a.options()).expand_as(a), /*upper=*/false, /*left=*/true,
                                       /*unitriangular=*/true);
  }
  // LibTorch's solver takes twice as long on matrices this small.
  const at::Tensor from = a.contiguous();
  at::Tensor x = at::empty_like(from);
  const int64_t count = from.numel() / (c * c);
  if (a.scalar_type() == at::kDouble) {
    invert_unit_lower(from.const_data_ptr<double>(), x.mutable_data_ptr<double>(), count, c);
  } else {
    invert_unit_lower(from.const_data_ptr<float>(), x.mutable_data_ptr<float>(), count, c);
  }
  return x;
}

// All of a block that does not depend on the state. Queries and keys stand under each other in one matrix: rows 0 … c−1
// are q̂, rows c … 2c−1 are k̂.
struct BlockFactors {
  at::Tensor norm_mB21;      // rsqrt(Σx² + eps) of each row, [m, B, 2c, 1]
  at::Tensor qk_mB2d;        // [m, B, 2c, dk]
  at::Tensor products_mB2c;  // Q̂K̂ᵀ over K̂K̂ᵀ
  Decays decay;
  at::Tensor beta_mBrc;
  at::Tensor keys_mBrcc;     // Γ ∘ K̂K̂ᵀ, strictly lower
  at::Tensor scores_mBrcc;   // P
  at::Tensor inverse_mBrcc;  // (I + A)⁻¹

  at::Tensor keys(int64_t chunk) const {  // k̂ of a chunk, [B, c, dk]
    const int64_t c = beta_mBrc.size(-1);
    return qk_mB2d.select(0, chunk).narrow(1, c, c);
  }
};

// e^{...} or β [m, B, r, c] as a column beside [m, B, r, c, v].
at::Tensor column(const at::Tensor& x_mBrc) { return x_mBrc.unsqueeze(-1); }

// [m, B, r, ...] -> [m·B·r, ...]
at::Tensor matrices(const at::Tensor& x) { return x.flatten(0, 2); }

// The same numbers of [m, B, c, r·v] seen as [m, B, r, c, v].
at::Tensor by_head(const at::Tensor& rows, int64_t repeat) {
  return rows.unflatten(-1, {repeat, rows.size(-1) / repeat}).transpose(2, 3);
}

// x [m, B, ...] of a view [m, n, g, ...], in x's dtype.
void copy_batch(const at::Tensor& x_mB, const at::Tensor& view) { x_mB.unflatten(1, {view.size(1), view.size(2)}).copy_(view); }

BlockFactors block_factors(const DeltaRuleInput& in, const ScanPlan& plan, const ScanSlice& slice, const ScanBlock& block) {
  const auto wide = accumulation_dtype(in.value_NTHv.scalar_type());
  const int64_t c = block.chunk, r = plan.shape().repeat;
  BlockFactors f;
  f.qk_mB2d = at::empty({block.chunks, slice.batch(), 2 * c, plan.shape().key_size}, in.log_decay_NTH.options());
  copy_batch(f.qk_mB2d.narrow(2, 0, c), group_view(in.query_NTKd, slice, block));
  copy_batch(f.qk_mB2d.narrow(2, c, c), group_view(in.key_NTKd, slice, block));
  f.norm_mB21 = (f.qk_mB2d * f.qk_mB2d).sum(-1, /*keepdim=*/true).add_(kNormEps).rsqrt_();
  f.qk_mB2d.mul_(f.norm_mB21);
  f.qk_mB2d.narrow(2, 0, c).mul_(1.0 / std::sqrt(double(plan.shape().key_size)));
  f.decay = decays(gather_scalars(in.log_decay_NTH, slice, block, r, wide));
  f.beta_mBrc = gather_scalars(in.beta_NTH, slice, block, r, wide);

  const at::Tensor keys_mBcd = f.qk_mB2d.narrow(2, c, c);
  f.products_mB2c = at::matmul(f.qk_mB2d, keys_mBcd.transpose(2, 3));
  f.scores_mBrcc = f.products_mB2c.narrow(2, 0, c).unsqueeze(2) * f.decay.between_mBrcc;
  f.keys_mBrcc = (f.products_mB2c.narrow(2, c, c).unsqueeze(2) * f.decay.between_mBrcc).tril_(-1);
  f.inverse_mBrcc = inverse_unit_lower(f.keys_mBrcc * column(f.beta_mBrc));
  return f;
}

// What a block's chunks make of the state, chunk by chunk.
struct BlockScan {
  at::Tensor states_mBkrv;   // at each chunk's start; undefined where they aren't kept
  at::Tensor read_mB2rv;     // Q̂ S over K̂ S, [m, B, 2c, r·v]
  at::Tensor error_mBrcv;    // V − e^G ∘ K̂ S
  at::Tensor update_mBrcv;   // U
  at::Tensor decayed_mBcrv;  // e^{G_c − G} ∘ U, [m, B, c, r·v]
};

// Walks the chunks; `state` becomes that at the block's end, or at its last chunk's start where all states are kept.
BlockScan scan_block(const BlockFactors& f, const at::Tensor& value_view, at::Tensor& state_Bkrv, bool keep_states) {
  const int64_t m = f.beta_mBrc.size(0), B = f.beta_mBrc.size(1), r = f.beta_mBrc.size(2), c = f.beta_mBrc.size(3);
  const int64_t k = state_Bkrv.size(1), columns = state_Bkrv.size(2), v = columns / r;
  const auto wide = state_Bkrv.options();
  BlockScan s;
  s.read_mB2rv = at::empty({m, B, 2 * c, columns}, wide);
  s.error_mBrcv = gather(value_view, wide.dtype().toScalarType());
  s.update_mBrcv = at::empty({m, B, r, c, v}, wide);
  s.decayed_mBcrv = at::empty({m, B, c, columns}, wide);
  if (keep_states) s.states_mBkrv = at::empty({m, B, k, columns}, wide);
  const at::Tensor whole_mB1r1 = f.decay.whole_mBr.unsqueeze(2).unsqueeze(-1);
  for (int64_t i = 0; i < m; ++i) {
    if (keep_states) s.states_mBkrv.select(0, i).copy_(state_Bkrv);
    at::Tensor read = s.read_mB2rv.select(0, i);
    at::bmm_out(read, f.qk_mB2d.select(0, i), state_Bkrv);
    at::Tensor error = s.error_mBrcv.select(0, i), update = s.update_mBrcv.select(0, i), decayed = s.decayed_mBcrv.select(0, i);
    error.addcmul_(column(f.decay.from_start_mBrc.select(0, i)), read.narrow(1, c, c).unflatten(-1, {r, v}).transpose(1, 2), -1);
    const at::Tensor scaled = error * column(f.beta_mBrc.select(0, i));
    at::Tensor update_matrices = update.flatten(0, 1);
    at::bmm_out(update_matrices, f.inverse_mBrcc.select(0, i).flatten(0, 1), scaled.flatten(0, 1));
    at::Tensor decayed_heads = decayed.unflatten(-1, {r, v}).transpose(1, 2);
    at::mul_out(decayed_heads, update, column(f.decay.to_end_mBrc.select(0, i)));
    if (keep_states && i + 1 == m) break;
    state_Bkrv.view({B, k, r, v}).mul_(whole_mB1r1.select(0, i));
    state_Bkrv.baddbmm_(f.keys(i).transpose(1, 2), decayed);
  }
  return s;
}

at::Tensor block_output(const BlockFactors& f, const BlockScan& s) {
  const int64_t r = f.beta_mBrc.size(2), c = f.beta_mBrc.size(3);
  at::Tensor out = at::bmm(matrices(f.scores_mBrcc), matrices(s.update_mBrcv)).view(s.update_mBrcv.sizes());
  return out.addcmul_(column(f.decay.from_start_mBrc), by_head(s.read_mB2rv.narrow(2, 0, c), r));
}

void forward_slice(const DeltaRuleInput& in, const ScanPlan& plan, const ScanSlice& slice, const DeltaRuleOutput& out) {
  const auto& shape = plan.shape();
  at::Tensor state = gather_state(in.state_NHkv, slice, shape, out.end_state_NHkv.options());
  for (const ScanBlock& block : plan.blocks(slice)) {
    if (out.chunk_states.defined()) scatter(plan.block_state(out.chunk_states, slice, block), state.unsqueeze(0));
    const BlockFactors factors = block_factors(in, plan, slice, block);
    const BlockScan scan = scan_block(factors, head_view(in.value_NTHv, slice, block, shape.repeat), state, /*keep_states=*/false);
    scatter(head_view(out.out_NTHv, slice, block, shape.repeat), block_output(factors, scan));
  }
  scatter_state(out.end_state_NHkv, slice, state);
}

// Adjoints of a block, found chunk by chunk from its end.
struct BlockAdjoints {
  at::Tensor reads_mB2rv;    // of Q̂ S over K̂ S
  at::Tensor solved_mBrcv;   // X = (I + A)⁻ᵀ dU
  at::Tensor kept_mBrc;      // of log e^{G_c − G}
  at::Tensor decay_end_mBr;  // of log e^{G_c}: e^{G_c} ⟨dS⁺, S⟩
  at::Tensor keys_mBcd;      // of k̂, as far as it goes into the state
};

// ⟨x, y⟩ over all but the head: [B, k, r·v] -> [B, r]
at::Tensor state_product(const at::Tensor& x, const at::Tensor& y, int64_t repeat) {
  return (x * y).sum(1).unflatten(-1, {repeat, x.size(2) / repeat}).sum(-1);
}

// `adjoint` is of the state at the block's end, and becomes that at its start.
BlockAdjoints walk_back(const BlockFactors& f, const BlockScan& s, const at::Tensor& grad_mBrcv, at::Tensor& adjoint_Bkrv) {
  const int64_t m = f.beta_mBrc.size(0), B = f.beta_mBrc.size(1), r = f.beta_mBrc.size(2), c = f.beta_mBrc.size(3);
  const int64_t k = adjoint_Bkrv.size(1), columns = adjoint_Bkrv.size(2), v = columns / r;
  const auto wide = adjoint_Bkrv.options();
  BlockAdjoints a;
  a.reads_mB2rv = at::empty({m, B, 2 * c, columns}, wide);
  a.solved_mBrcv = at::empty({m, B, r, c, v}, wide);
  a.kept_mBrc = at::empty({m, B, r, c}, wide);
  a.decay_end_mBr = at::empty({m, B, r}, wide);
  a.keys_mBcd = at::empty({m, B, c, k}, wide);
  at::Tensor read_queries = by_head(a.reads_mB2rv.narrow(2, 0, c), r);
  at::mul_out(read_queries, grad_mBrcv, column(f.decay.from_start_mBrc));
  const at::Tensor beta_start_mBrc = f.beta_mBrc * f.decay.from_start_mBrc;
  at::Tensor updates_mBrcv =
      at::bmm(matrices(f.scores_mBrcc).transpose(1, 2), matrices(grad_mBrcv)).view(grad_mBrcv.sizes());  // Pᵀ dO
  for (int64_t i = m - 1; i >= 0; --i) {
    const at::Tensor update = s.update_mBrcv.select(0, i), state = s.states_mBkrv.select(0, i);
    at::Tensor solved = a.solved_mBrcv.select(0, i), reads = a.reads_mB2rv.select(0, i), keys = a.keys_mBcd.select(0, i);
    const at::Tensor to_end = f.decay.to_end_mBrc.select(0, i), whole_Br = f.decay.whole_mBr.select(0, i);
    const at::Tensor pulled = at::bmm(f.keys(i), adjoint_Bkrv).unflatten(-1, {r, v}).transpose(1, 2);  // K̂ dS⁺, [B, r, c, v]
    at::Tensor update_adjoint = updates_mBrcv.select(0, i).addcmul_(column(to_end), pulled);
    at::Tensor solved_matrices = solved.flatten(0, 1);
    at::bmm_out(solved_matrices, f.inverse_mBrcc.select(0, i).flatten(0, 1).transpose(1, 2), update_adjoint.flatten(0, 1));
    at::Tensor read_keys = reads.narrow(1, c, c).unflatten(-1, {r, v}).transpose(1, 2);
    at::mul_out(read_keys, solved, column(beta_start_mBrc.select(0, i)).neg());
    at::bmm_out(keys, s.decayed_mBcrv.select(0, i), adjoint_Bkrv.transpose(1, 2));

    a.kept_mBrc.select(0, i).copy_((update * pulled).sum(-1)).mul_(to_end);
    a.decay_end_mBr.select(0, i).copy_(state_product(adjoint_Bkrv, state, r)).mul_(whole_Br);

    adjoint_Bkrv.view({B, k, r, v}).mul_(whole_Br.unsqueeze(1).unsqueeze(-1));
    adjoint_Bkrv.baddbmm_(f.qk_mB2d.select(0, i).transpose(1, 2), reads);
  }
  return a;
}

// Gradient of x behind x̂ = scale · x · norm, given x̂ and its gradient.
at::Tensor normalization_gradient(const at::Tensor& grad, const at::Tensor& normalized, const at::Tensor& norm, double scale) {
  const at::Tensor along = (grad * normalized).sum(-1, /*keepdim=*/true).mul_(1.0 / (scale * scale));
  return (grad - normalized * along).mul_(norm * scale);
}

// Everything that is known once the adjoints of the states are: writes the block's gradients.
void write_gradients(const BlockFactors& f, const BlockScan& s, const BlockAdjoints& a, const at::Tensor& grad_mBrcv,
                     const ScanSlice& slice, const ScanBlock& block, const DeltaRuleGradients& into) {
  const int64_t r = f.beta_mBrc.size(2), c = block.chunk;
  const auto& shape = f.scores_mBrcc.sizes();
  const at::Tensor updates = matrices(s.update_mBrcv).transpose(1, 2);
  const at::Tensor score_grad = at::bmm(matrices(grad_mBrcv), updates).view(shape).mul_(f.decay.between_mBrcc);
  at::Tensor key_grad = at::bmm(matrices(a.solved_mBrcv), updates).view(shape).neg_();  // of A

  // β reaches A's rows and the right side of the system.
  const at::Tensor beta_part = key_grad * f.keys_mBrcc;
  const at::Tensor beta_grad = beta_part.sum(-1).add_((a.solved_mBrcv * s.error_mBrcv).sum(-1));
  key_grad.mul_(f.decay.between_mBrcc).mul_(column(f.beta_mBrc)).tril_(-1);

  at::Tensor pair_grad = score_grad * f.products_mB2c.narrow(2, 0, c).unsqueeze(2);
  pair_grad.addcmul_(beta_part, column(f.beta_mBrc));
  const at::Tensor through_reads = by_head(a.reads_mB2rv * s.read_mB2rv, r).sum(-1);  // [m, B, r, 2c]
  const at::Tensor log_decay_grad =
      log_decay_gradient(pair_grad, through_reads.narrow(-1, 0, c) + through_reads.narrow(-1, c, c), a.kept_mBrc, a.decay_end_mBr);

  // Queries and keys: through the products inside the chunk, summed over the heads of a group, and through the state.
  const at::Tensor inside = at::cat({score_grad.sum(2), key_grad.sum(2)}, 2);  // [m, B, 2c, c]
  at::Tensor qk_grad =
      at::matmul(inside, f.qk_mB2d.narrow(2, c, c)).add_(at::matmul(a.reads_mB2rv, s.states_mBkrv.transpose(2, 3)));
  at::Tensor query_grad = qk_grad.narrow(2, 0, c), keys_grad = qk_grad.narrow(2, c, c);
  keys_grad.add_(a.keys_mBcd).add_(at::matmul(inside.transpose(2, 3), f.qk_mB2d));

  const double scale = 1.0 / std::sqrt(double(f.qk_mB2d.size(-1)));
  const auto part = [&](const at::Tensor& x, int64_t first) { return x.narrow(2, first, c); };
  scatter(group_view(into.query, slice, block),
          normalization_gradient(query_grad, part(f.qk_mB2d, 0), part(f.norm_mB21, 0), scale));
  scatter(group_view(into.key, slice, block), normalization_gradient(keys_grad, part(f.qk_mB2d, c), part(f.norm_mB21, c), 1.0));
  scatter(head_view(into.value, slice, block, r), a.solved_mBrcv * column(f.beta_mBrc));
  scatter(scalar_view(into.beta, slice, block, r), beta_grad);
  scatter(scalar_view(into.log_decay, slice, block, r), log_decay_grad);
}

void backward_slice(const DeltaRuleInput& in, const ScanPlan& plan, const ScanSlice& slice, const at::Tensor& block_states,
                    const at::Tensor& grad_out, const at::Tensor& grad_end_state, const DeltaRuleGradients& into,
                    const at::Tensor& state_grad) {
  const int64_t r = plan.shape().repeat;
  const auto wide = state_grad.options();
  at::Tensor adjoint = gather_state(grad_end_state, slice, plan.shape(), wide);
  const auto blocks = plan.blocks(slice);
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    const BlockFactors factors = block_factors(in, plan, slice, *block);
    at::Tensor state = gather(plan.block_state(block_states, slice, *block), wide.dtype().toScalarType()).squeeze(0);
    const BlockScan scan = scan_block(factors, head_view(in.value_NTHv, slice, *block, r), state, /*keep_states=*/true);
    const at::Tensor grad = grad_out.defined() ? gather_heads(grad_out, slice, *block, r, wide.dtype().toScalarType())
                                               : at::zeros_like(scan.update_mBrcv);
    const BlockAdjoints adjoints = walk_back(factors, scan, grad, adjoint);
    write_gradients(factors, scan, adjoints, grad, slice, *block, into);
  }
  scatter_state(state_grad, slice, adjoint);
}

}  // namespace

DeltaRuleOutput delta_rule_forward(const DeltaRuleInput& input, int64_t chunk, bool for_backward) {
  const at::NoGradGuard no_grad;
  const ScanShape shape = checked_shape(input);
  const ScanPlan plan("delta rule", shape, input.lengths, chunk, input.value_NTHv.device());
  const auto wide = input.log_decay_NTH.options();
  DeltaRuleOutput out{.out_NTHv = at::empty(input.value_NTHv.sizes(), input.value_NTHv.options()),
                      .end_state_NHkv = at::empty({shape.sequences, shape.heads(), shape.key_size, shape.value_size}, wide)};
  if (for_backward) out.chunk_states = plan.make_block_states(wide);
  plan.for_each_slice([&](const ScanSlice& slice) { forward_slice(input, plan, slice, out); });
  plan.clear_padding(out.out_NTHv);
  return out;
}

DeltaRuleGradients delta_rule_backward(const DeltaRuleInput& input, const DeltaRuleOutput& saved, const at::Tensor& grad_out,
                                       const at::Tensor& grad_end_state, int64_t chunk) {
  const at::NoGradGuard no_grad;
  const ScanShape shape = checked_shape(input);
  const ScanPlan plan("delta rule", shape, input.lengths, chunk, input.value_NTHv.device());
  const auto wide = input.log_decay_NTH.options();
  const std::vector<int64_t> state_shape{shape.sequences, shape.heads(), shape.key_size, shape.value_size};
  check_shape("chunk_states", saved.chunk_states, wide.dtype().toScalarType(),
              plan.make_block_states(wide.device(at::kMeta)).sizes());
  if (grad_out.defined()) check_shape("grad_out", grad_out, input.value_NTHv.scalar_type(), input.value_NTHv.sizes());
  if (grad_end_state.defined()) check_shape("grad_end_state", grad_end_state, wide.dtype().toScalarType(), state_shape);

  const auto like = [](const at::Tensor& x) { return at::empty(x.sizes(), x.options()); };
  DeltaRuleGradients into{like(input.query_NTKd),    like(input.key_NTKd), like(input.value_NTHv),
                          like(input.log_decay_NTH), like(input.beta_NTH), {}};
  const at::Tensor state_grad = at::empty(state_shape, wide);
  plan.for_each_slice([&](const ScanSlice& slice) {
    backward_slice(input, plan, slice, saved.chunk_states, grad_out, grad_end_state, into, state_grad);
  });
  for (const at::Tensor& grad : {into.query, into.key, into.value, into.log_decay, into.beta}) plan.clear_padding(grad);
  if (input.state_NHkv.defined()) {
    into.state = input.state_NHkv.size(0) == shape.sequences ? state_grad : state_grad.sum(0, /*keepdim=*/true);
  }
  return into;
}

}  // namespace longstraw
