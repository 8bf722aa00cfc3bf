#include "longstraw/state_space.h"

#include "longstraw/chunked_scan.h"

#include "core/base/errors.h"
#include "core/device/device.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace longstraw {
namespace {

using core::device::accumulation_dtype;

void check(bool good, const char* name, const at::Tensor& tensor, const std::string& wanted) {
  if (good) return;
  throw ConfigError(fmt::format("state space: {}: {} [{}], expected {}", name,
                                tensor.defined() ? toString(tensor.scalar_type()) : "none",
                                tensor.defined() ? fmt::format("{}", fmt::join(tensor.sizes(), ", ")) : "", wanted));
}

void check_shape(const char* name, const at::Tensor& tensor, at::ScalarType dtype, at::IntArrayRef shape) {
  check(tensor.defined() && tensor.sizes() == shape && tensor.scalar_type() == dtype, name, tensor,
        fmt::format("{} [{}]", toString(dtype), fmt::join(shape, ", ")));
}

ScanShape checked_shape(const StateSpaceInput& in) {
  check(in.x_NTHp.defined() && in.x_NTHp.dim() == 4, "x", in.x_NTHp, "[N, T, H, p]");
  const auto dtype = in.x_NTHp.scalar_type(), wide = accumulation_dtype(dtype);
  const int64_t N = in.x_NTHp.size(0), T = in.x_NTHp.size(1), H = in.x_NTHp.size(2), p = in.x_NTHp.size(3);
  check(in.b_NTGn.defined() && in.b_NTGn.dim() == 4, "b", in.b_NTGn, "[N, T, G, n]");
  const int64_t G = in.b_NTGn.size(2), n = in.b_NTGn.size(3);
  check(G > 0 && H % G == 0, "b", in.b_NTGn, fmt::format("a number of groups that divides the {} heads", H));
  check_shape("b", in.b_NTGn, dtype, {N, T, G, n});
  check_shape("c", in.c_NTGn, dtype, {N, T, G, n});
  check_shape("dt", in.dt_NTH, wide, {N, T, H});
  check_shape("a", in.a_H, wide, {H});
  if (in.state_NHpn.defined()) check_shape("state", in.state_NHpn, wide, {in.state_NHpn.size(0) == 1 ? 1 : N, H, p, n});
  return {.sequences = N, .tokens = T, .groups = G, .repeat = H / G, .key_size = n, .value_size = p};
}

// e^{...} or dt [m, B, r, c] as a column beside [m, B, r, c, p].
at::Tensor column(const at::Tensor& x_mBrc) { return x_mBrc.unsqueeze(-1); }

// [m, B, r, ...] -> [m·B·r, ...]
at::Tensor matrices(const at::Tensor& x) { return x.flatten(0, 2); }

// The same numbers of [.., c, r·p] seen as [.., r, c, p].
at::Tensor by_head(const at::Tensor& rows, int64_t repeat) {
  return rows.unflatten(-1, {repeat, rows.size(-1) / repeat}).transpose(-3, -2);
}

// [.., r, c, p] as rows [.., c, r·p], scaled.
at::Tensor rows_of(const at::Tensor& x_rcp, const at::Tensor& scale_rc1) {
  const int64_t r = x_rcp.size(-3), c = x_rcp.size(-2), p = x_rcp.size(-1);
  auto shape = x_rcp.sizes().slice(0, size_t(x_rcp.dim()) - 3).vec();
  shape.insert(shape.end(), {c, r * p});
  at::Tensor rows = at::empty(shape, x_rcp.options());
  at::Tensor heads = by_head(rows, r);
  at::mul_out(heads, x_rcp, scale_rc1);
  return rows;
}

// All of a block that does not depend on the state. The state is kept transposed, [B, n, r·p]: the heads of a group beside
// each other.
struct BlockFactors {
  at::Tensor b_mBcn, c_mBcn;
  at::Tensor dt_mBrc;
  Decays decay;
  at::Tensor x_mBrcp;       // X = dt ∘ x
  at::Tensor added_mBcrp;   // e^{G_c − G} ∘ X as rows, what the chunk adds to the state
  at::Tensor scores_mBrcc;  // P
};

BlockFactors block_factors(const StateSpaceInput& in, const ScanPlan& plan, const ScanSlice& slice, const ScanBlock& block) {
  const auto wide = accumulation_dtype(in.x_NTHp.scalar_type());
  const int64_t r = plan.shape().repeat;
  BlockFactors f;
  f.b_mBcn = gather_groups(in.b_NTGn, slice, block, wide);
  f.c_mBcn = gather_groups(in.c_NTGn, slice, block, wide);
  f.dt_mBrc = gather_scalars(in.dt_NTH, slice, block, r, wide);
  const at::Tensor a_gr = in.a_H.narrow(0, slice.first_group * r, slice.groups * r).view({1, slice.groups, r, 1});
  const at::Tensor a_Br1 = a_gr.expand({slice.sequences, -1, -1, -1}).flatten(0, 1);
  f.decay = decays(f.dt_mBrc * a_Br1);
  f.x_mBrcp = gather(head_view(in.x_NTHp, slice, block, r), wide).mul_(column(f.dt_mBrc));
  f.added_mBcrp = rows_of(f.x_mBrcp, column(f.decay.to_end_mBrc));
  f.scores_mBrcc = at::matmul(f.c_mBcn, f.b_mBcn.transpose(2, 3)).unsqueeze(2) * f.decay.between_mBrcc;
  return f;
}

// e^{G_c} of each head beside a state [B, n, r, p].
at::Tensor whole(const BlockFactors& f, int64_t chunk) { return f.decay.whole_mBr.select(0, chunk).unsqueeze(1).unsqueeze(-1); }

// C hᵀ of each chunk, [m, B, c, r·p]; `state` becomes that at the block's end. If `states_mBnrp` is defined, it gets the states at
// the chunks' starts, and `state` only becomes the last of these.
at::Tensor scan_block(const BlockFactors& f, at::Tensor& state_Bnrp, const at::Tensor& states_mBnrp) {
  const int64_t m = f.dt_mBrc.size(0), B = f.dt_mBrc.size(1), r = f.dt_mBrc.size(2), c = f.dt_mBrc.size(3);
  const int64_t n = state_Bnrp.size(1), columns = state_Bnrp.size(2);
  const at::Tensor read_mBcrp = at::empty({m, B, c, columns}, state_Bnrp.options());
  for (int64_t i = 0; i < m; ++i) {
    if (states_mBnrp.defined()) states_mBnrp.select(0, i).copy_(state_Bnrp);
    at::Tensor read = read_mBcrp.select(0, i);
    at::bmm_out(read, f.c_mBcn.select(0, i), state_Bnrp);
    if (states_mBnrp.defined() && i + 1 == m) break;
    state_Bnrp.view({B, n, r, columns / r}).mul_(whole(f, i));
    state_Bnrp.baddbmm_(f.b_mBcn.select(0, i).transpose(1, 2), f.added_mBcrp.select(0, i));
  }
  return read_mBcrp;
}

at::Tensor transposed_state(const at::Tensor& state_NHpn) { return state_NHpn.defined() ? state_NHpn.transpose(2, 3) : state_NHpn; }

void forward_slice(const StateSpaceInput& in, const ScanPlan& plan, const ScanSlice& slice, const StateSpaceOutput& out) {
  const int64_t r = plan.shape().repeat;
  at::Tensor state = gather_state(transposed_state(in.state_NHpn), slice, plan.shape(), out.end_state_NHpn.options());
  for (const ScanBlock& block : plan.blocks(slice)) {
    if (out.chunk_states.defined()) scatter(plan.block_state(out.chunk_states, slice, block), state.unsqueeze(0));
    const BlockFactors f = block_factors(in, plan, slice, block);
    const at::Tensor read = scan_block(f, state, {});
    at::Tensor y = at::bmm(matrices(f.scores_mBrcc), matrices(f.x_mBrcp)).view(f.x_mBrcp.sizes());
    y.addcmul_(column(f.decay.from_start_mBrc), by_head(read, r));
    scatter(head_view(out.out_NTHp, slice, block, r), y);
  }
  scatter_state(out.end_state_NHpn.transpose(2, 3), slice, state);
}

// Adjoints of a block, found chunk by chunk from its end.
struct BlockAdjoints {
  at::Tensor reads_mBcrp;    // of C hᵀ: e^G ∘ dY
  at::Tensor pulled_mBcrp;   // B dh⁺, what the state's adjoint asks of each X before its decay to the end
  at::Tensor b_mBcn;         // of b, as far as it goes into the state
  at::Tensor decay_end_mBr;  // e^{G_c} ⟨dh⁺, h⟩
};

BlockAdjoints walk_back(const BlockFactors& f, const at::Tensor& states_mBnrp, const at::Tensor& grad_mBrcp,
                        at::Tensor& adjoint_Bnrp) {
  const int64_t m = f.dt_mBrc.size(0), B = f.dt_mBrc.size(1), r = f.dt_mBrc.size(2), c = f.dt_mBrc.size(3);
  const int64_t n = adjoint_Bnrp.size(1), columns = adjoint_Bnrp.size(2);
  const auto wide = adjoint_Bnrp.options();
  BlockAdjoints a{rows_of(grad_mBrcp, column(f.decay.from_start_mBrc)), at::empty({m, B, c, columns}, wide),
                  at::empty({m, B, c, n}, wide), at::empty({m, B, r}, wide)};
  for (int64_t i = m - 1; i >= 0; --i) {
    at::Tensor pulled = a.pulled_mBcrp.select(0, i), b = a.b_mBcn.select(0, i);
    at::bmm_out(pulled, f.b_mBcn.select(0, i), adjoint_Bnrp);
    at::bmm_out(b, f.added_mBcrp.select(0, i), adjoint_Bnrp.transpose(1, 2));
    adjoint_Bnrp.view({B, n, r, columns / r}).mul_(whole(f, i));
    const at::Tensor product = (adjoint_Bnrp * states_mBnrp.select(0, i)).sum(1);
    a.decay_end_mBr.select(0, i).copy_(product.unflatten(-1, {r, columns / r}).sum(-1));
    adjoint_Bnrp.baddbmm_(f.c_mBcn.select(0, i).transpose(1, 2), a.reads_mBcrp.select(0, i));
  }
  return a;
}

// Everything that is known once the adjoints of the states are: writes the block's gradients. That of the log decays goes
// into into.a and into.dt by the caller; here it is returned, [m, B, r, c].
at::Tensor write_gradients(const StateSpaceInput& in, const BlockFactors& f, const at::Tensor& states_mBnrp,
                           const at::Tensor& read_mBcrp, const BlockAdjoints& a, const at::Tensor& grad_mBrcp,
                           const ScanSlice& slice, const ScanBlock& block, const StateSpaceGradients& into) {
  const int64_t r = f.dt_mBrc.size(2);
  const at::Tensor pulled = by_head(a.pulled_mBcrp, r), to_end = column(f.decay.to_end_mBrc);
  // Of X: from the chunk's own tokens and from the state.
  at::Tensor x_grad = at::bmm(matrices(f.scores_mBrcc).transpose(1, 2), matrices(grad_mBrcp)).view(grad_mBrcp.sizes());
  x_grad.addcmul_(to_end, pulled);
  const at::Tensor score_grad = at::bmm(matrices(grad_mBrcp), matrices(f.x_mBrcp).transpose(1, 2)).view(f.scores_mBrcc.sizes());

  const at::Tensor log_decay = log_decay_gradient(score_grad * f.scores_mBrcc, by_head(a.reads_mBcrp * read_mBcrp, r).sum(-1),
                                                  (f.x_mBrcp * pulled).sum(-1).mul_(f.decay.to_end_mBrc), a.decay_end_mBr);

  const at::Tensor inside = (score_grad * f.decay.between_mBrcc).sum(2);  // of C Bᵀ, over the heads of a group
  const at::Tensor c_grad = at::matmul(inside, f.b_mBcn).add_(at::matmul(a.reads_mBcrp, states_mBnrp.transpose(2, 3)));
  const at::Tensor b_grad = at::matmul(inside.transpose(2, 3), f.c_mBcn).add_(a.b_mBcn);
  scatter(group_view(into.c, slice, block), c_grad);
  scatter(group_view(into.b, slice, block), b_grad);
  scatter(head_view(into.x, slice, block, r), x_grad * column(f.dt_mBrc));
  const at::Tensor x = gather(head_view(in.x_NTHp, slice, block, r), x_grad.scalar_type());
  scatter(scalar_view(into.dt, slice, block, r), (x_grad * x).sum(-1));
  return log_decay;
}

// `a_grad_NH` gets each sequence's share of the gradient of a.
void backward_slice(const StateSpaceInput& in, const ScanPlan& plan, const ScanSlice& slice, const at::Tensor& block_states,
                    const at::Tensor& grad_out, const at::Tensor& grad_end_state, const StateSpaceGradients& into,
                    const at::Tensor& state_grad, const at::Tensor& a_grad_NH) {
  const ScanShape& shape = plan.shape();
  const int64_t r = shape.repeat;
  const auto wide = state_grad.options();
  const auto dtype = wide.dtype().toScalarType();
  at::Tensor adjoint = gather_state(transposed_state(grad_end_state), slice, shape, wide);
  at::Tensor a_grad_Br = at::zeros({slice.batch(), r}, wide.dtype(at::kDouble));
  const at::Tensor a_gr = in.a_H.narrow(0, slice.first_group * r, slice.groups * r).view({slice.groups, r, 1});
  const auto blocks = plan.blocks(slice);
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    const BlockFactors f = block_factors(in, plan, slice, *block);
    at::Tensor state = gather(plan.block_state(block_states, slice, *block), dtype).squeeze(0);
    const at::Tensor states = at::empty({block->chunks, slice.batch(), shape.key_size, r * shape.value_size}, wide);
    const at::Tensor read = scan_block(f, state, states);
    const at::Tensor grad = grad_out.defined() ? gather_heads(grad_out, slice, *block, r, dtype) : at::zeros_like(f.x_mBrcp);
    const BlockAdjoints adjoints = walk_back(f, states, grad, adjoint);
    const at::Tensor log_decay = write_gradients(in, f, states, read, adjoints, grad, slice, *block, into);
    const at::Tensor dt_view = scalar_view(into.dt, slice, *block, r);
    dt_view.addcmul_(log_decay.unflatten(1, {slice.sequences, slice.groups}), a_gr);
    a_grad_Br.add_((log_decay * f.dt_mBrc).sum(at::IntArrayRef{0, 3}, /*keepdim=*/false, at::kDouble));
  }
  scatter_state(state_grad.transpose(2, 3), slice, adjoint);
  a_grad_NH.narrow(0, slice.first_sequence, slice.sequences)
      .narrow(1, slice.first_group * r, slice.groups * r)
      .copy_(a_grad_Br.view({slice.sequences, slice.groups * r}));
}

}  // namespace

StateSpaceOutput state_space_forward(const StateSpaceInput& input, int64_t chunk, bool for_backward) {
  const at::NoGradGuard no_grad;
  const ScanShape shape = checked_shape(input);
  const ScanPlan plan("state space", shape, input.lengths, chunk, input.x_NTHp.device());
  const auto wide = input.dt_NTH.options();
  StateSpaceOutput out{.out_NTHp = at::empty(input.x_NTHp.sizes(), input.x_NTHp.options()),
                       .end_state_NHpn = at::empty({shape.sequences, shape.heads(), shape.value_size, shape.key_size}, wide)};
  if (for_backward) out.chunk_states = plan.make_block_states(wide);
  plan.for_each_slice([&](const ScanSlice& slice) { forward_slice(input, plan, slice, out); });
  plan.clear_padding(out.out_NTHp);
  return out;
}

StateSpaceGradients state_space_backward(const StateSpaceInput& input, const StateSpaceOutput& saved, const at::Tensor& grad_out,
                                         const at::Tensor& grad_end_state, int64_t chunk) {
  const at::NoGradGuard no_grad;
  const ScanShape shape = checked_shape(input);
  const ScanPlan plan("state space", shape, input.lengths, chunk, input.x_NTHp.device());
  const auto wide = input.dt_NTH.options();
  const auto dtype = wide.dtype().toScalarType();
  const std::vector<int64_t> state_shape{shape.sequences, shape.heads(), shape.value_size, shape.key_size};
  check_shape("chunk_states", saved.chunk_states, dtype, plan.make_block_states(wide.device(at::kMeta)).sizes());
  if (grad_out.defined()) check_shape("grad_out", grad_out, input.x_NTHp.scalar_type(), input.x_NTHp.sizes());
  if (grad_end_state.defined()) check_shape("grad_end_state", grad_end_state, dtype, state_shape);

  const auto like = [](const at::Tensor& x) { return at::empty(x.sizes(), x.options()); };
  StateSpaceGradients into{like(input.x_NTHp), like(input.dt_NTH), {}, like(input.b_NTGn), like(input.c_NTGn), {}};
  const at::Tensor state_grad = at::empty(state_shape, wide);
  const at::Tensor a_grad_NH = at::empty({shape.sequences, shape.heads()}, wide.dtype(at::kDouble));
  plan.for_each_slice([&](const ScanSlice& slice) {
    backward_slice(input, plan, slice, saved.chunk_states, grad_out, grad_end_state, into, state_grad, a_grad_NH);
  });
  for (const at::Tensor& grad : {into.x, into.dt, into.b, into.c}) plan.clear_padding(grad);
  into.a = a_grad_NH.sum(0).to(dtype);
  if (input.state_NHpn.defined()) {
    into.state = input.state_NHpn.size(0) == shape.sequences ? state_grad : state_grad.sum(0, /*keepdim=*/true);
  }
  return into;
}

}  // namespace longstraw
