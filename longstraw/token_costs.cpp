#include "longstraw/token_costs.h"

#include "longstraw/attention_block.h"
#include "longstraw/chunked_scan.h"
#include "longstraw/loss_head.h"
#include "longstraw/prefix_attention.h"
#include "longstraw/segment_execution.h"
#include "longstraw/sparse_attention.h"

#include "core/device/device.h"
#include "core/model/adapters.h"
#include "core/model/state_size.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace longstraw {
namespace {

namespace model = core::model;

// Bytes a token of one block: kept by its graph, kept when only its state is made, alive at once in its forward pass, and
// in its backward pass beside the graph.
struct BlockCost {
  int64_t graph = 0, state_graph = 0, forward = 0, backward = 0;
  int64_t block_tokens = 0, scratch = 0;  // of a scan: tokens of a block, bytes for each of them in the backward pass
};

// How a scan over one long sequence is cut on CPU (chunked_scan.h): a state is kept for each block, and each thread works on one.
struct ScanCost {
  int64_t block_tokens, scratch;
};
// `rows` of values, and of a token's pairs with its chunk, are alive at once in the backward pass.
ScanCost scan_of(int64_t groups, int64_t repeat, int64_t key, int64_t value, int64_t wide, int64_t rows, int64_t pairs) {
  const ScanShape shape{
      .sequences = 1, .tokens = 64 * kRecurrentChunk, .groups = groups, .repeat = repeat, .key_size = key, .value_size = value};
  const ScanPlan plan("memory plan", shape, {}, kRecurrentChunk, at::kCPU);
  const ScanSlice& slice = plan.slices().front();
  const int64_t tokens = plan.blocks(slice).front().tokens();
  const int64_t workers = std::min<int64_t>(at::get_num_threads(), static_cast<int64_t>(plan.slices().size()));
  // Workers' widest moments need not coincide: with several this is an upper bound.
  return {tokens, workers * slice.batch() * repeat * (rows * value + pairs * kRecurrentChunk) * wide};
}

// s: bytes of a number of the model; w: of a wide one; D: hidden size.
struct CostOfBlock {
  int64_t s, w, D;

  BlockCost operator()(const model::AttentionShape& a) const {
    const int64_t q = a.heads * a.head_dim, k = a.kv_heads * a.head_dim;
    // Query and output, key and value, the log-sum-exp.
    BlockCost cost{.graph = (2 * q + 2 * k) * s + a.heads * w, .state_graph = 2 * k * s, .forward = 0, .backward = 0};
    if (a.query_key_norm) {  // inputs of both norms; the query's lies beside its gate in one projection
      cost.graph += ((a.output_gate ? 2 * q : q) + k) * s + (a.heads + a.kv_heads) * w;
      cost.state_graph += k * s + a.kv_heads * w;
    }
    if (a.output_gate) cost.graph += 2 * q * s;  // the gate and what it leaves of the output
    cost.forward = (3 * q + 2 * k) * s;
    cost.backward = (3 * q + 2 * k) * s;
    return cost;
  }

  BlockCost operator()(const model::LatentAttentionShape& a) const {
    const int64_t queries = a.heads * (a.plain_dim + a.rotary_dim), row = a.latent + a.rotary_dim, rank = a.query_rank.value_or(0);
    const int64_t values = a.heads * a.value_dim;
    BlockCost cost;
    // kv_a's product, the normed latent, the row; the ranks of the query before and after their norm.
    cost.state_graph = (2 * row + a.latent) * s + w;
    cost.graph = cost.state_graph + 2 * rank * s + (a.query_rank ? w : 0);
    // Queries, absorbed and with their rotary part; mixed latents; values.
    cost.graph += (queries + a.heads * row + a.heads * a.latent + values) * s + a.heads * w;
    if (a.indexer) cost.graph += a.indexer->top_k * int64_t{4};
    cost.forward = (queries + 3 * a.heads * row) * s;
    cost.backward = (queries + 3 * a.heads * row) * s;
    return cost;
  }

  BlockCost operator()(const model::DeltaRuleShape& a) const {
    const int64_t values = a.value_heads * a.value_dim, channels = 2 * a.key_heads * a.key_dim + values;
    BlockCost cost;
    // Before and after the convolution; decay and step, each with what their activation keeps; the states of chunks.
    const ScanCost scan = scan_of(a.key_heads, a.value_heads / a.key_heads, a.key_dim, a.value_dim, w, /*rows=*/10, /*pairs=*/7);
    cost.scratch = scan.scratch;
    cost.block_tokens = scan.block_tokens;
    cost.state_graph = 2 * channels * s + 5 * a.value_heads * w + a.value_heads * a.key_dim * a.value_dim * w / scan.block_tokens;
    // Output, its norm and the gated product; the gate and its activation, which are wide.
    cost.graph = cost.state_graph + values * (3 * s + 2 * w) + a.value_heads * w;
    cost.forward = (2 * channels + 3 * values) * w;
    cost.backward = (2 * channels + 3 * values) * w;
    return cost;
  }

  BlockCost operator()(const model::StateSpaceShape& a) const {
    const int64_t inner = a.heads * a.head_dim, channels = inner + 2 * a.groups * a.state;
    const int64_t projected = inner + channels + a.heads;
    BlockCost cost;
    const ScanCost scan = scan_of(a.groups, a.heads / a.groups, a.state, a.head_dim, w, /*rows=*/7, /*pairs=*/4);
    cost.scratch = scan.scratch;
    cost.block_tokens = scan.block_tokens;
    cost.state_graph = projected * s + channels * w + 2 * a.heads * w + inner * a.state * w / scan.block_tokens;
    // Skip, activated gate, gated, normed and scaled outputs.
    const int64_t pointwise = a.norm == model::StateSpaceShape::Norm::kNone ? 3 : 5;
    cost.graph = cost.state_graph + pointwise * inner * w + inner * (s == w ? 0 : s);
    cost.forward = (projected + 2 * channels + 2 * inner) * w;
    cost.backward = (2 * channels + 3 * inner) * w;
    return cost;
  }

  BlockCost operator()(const model::MlpShape& a) const {
    const int64_t kept = a.gated ? 3 : 2;
    return {.graph = kept * a.width * s, .state_graph = 0, .forward = 3 * a.width * s, .backward = 3 * a.width * s};
  }

  BlockCost operator()(const model::ExpertsShape& a) const {
    BlockCost cost;
    // Scores, chosen ids and their order, weights; x again where the router works wide.
    cost.graph = 2 * a.experts * w + a.chosen * (2 * int64_t{8} + 3 * w) + (s == w ? 0 : D * w);
    if (a.latent > 0) cost.graph += 2 * a.latent * s;
    if (a.shared_width > 0) cost.graph += (a.gated ? 3 : 2) * a.shared_width * s + D * s;
    const int64_t inputs = a.latent > 0 ? a.latent : D;
    cost.forward = a.chosen * (inputs * (s + w) + 3 * a.width * s) + D * w;
    cost.backward = a.chosen * (inputs * (s + w) + 4 * a.width * w) + D * w;
    return cost;
  }
};

}  // namespace

TokenCosts::TokenCosts(const model::Decoder& decoder)
    : dtype_(decoder.dtype()),
      size_(static_cast<int64_t>(c10::elementSize(dtype_))),
      wide_(static_cast<int64_t>(c10::elementSize(core::device::accumulation_dtype(dtype_)))),
      vocab_(decoder.architecture().vocab),
      hidden_(decoder.architecture().hidden) {
  count_states(decoder);
  count_layers(decoder);
}

void TokenCosts::count_states(const model::Decoder& decoder) {
  for (const auto& state : decoder.states()) {
    int64_t row = 0;
    for (const auto& rows : state.rows) {
      row += rows.heads * rows.width * size_;
      if (rows.adjoint) adjoint_ += rows.heads * rows.width * wide_;
    }
    if (state.window) windowed_.push_back({*state.window, row});
    else state_ += row;
    for (const auto& carried : state.carried) {
      const int64_t elements = model::element_count(carried.shape);
      border_ += elements * (carried.wide ? wide_ : size_);
      border_adjoint_ += elements * wide_;
    }
  }
  choices_ = model::expert_choice_bytes(decoder.routers());
}

void TokenCosts::count_layers(const model::Decoder& decoder) {
  const CostOfBlock cost_of{size_, wide_, hidden_};
  const int64_t with_state = decoder.layers_with_state();
  const auto& layers = decoder.blocks();
  for (int64_t n = 0; n < static_cast<int64_t>(layers.size()); ++n) {
    int64_t released = 0;  // by residuals that come after the one at hand
    const auto& residuals = layers[n].residuals;
    for (auto residual = residuals.rbegin(); residual != residuals.rend(); ++residual) {
      // Input and output of the norm, and its scale.
      const int64_t norm = (residual->wide ? wide_ : size_) * hidden_ + hidden_ * size_ + wide_;
      int64_t graph = norm, state_graph = norm;
      bool has_state = false;
      for (const auto& block : residual->blocks) {
        const auto shape = block->shape();
        const BlockCost cost = std::visit(cost_of, shape);
        graph += cost.graph;
        state_graph += cost.state_graph;
        has_state |= block->has_state();
        forward_ = std::max(forward_, 2 * hidden_ * size_ + cost.forward);
        backward_ = std::max(backward_, 2 * hidden_ * size_ + cost.backward);
        if (cost.scratch > 0) scans_.push_back({cost.block_tokens, cost.scratch});
        if (const auto* a = std::get_if<model::AttentionShape>(&shape)) {
          softmax_.push_back({a->heads, a->kv_heads, a->head_dim, a->head_dim, a->window, {}, released});
        } else if (const auto* l = std::get_if<model::LatentAttentionShape>(&shape)) {
          const auto listed = l->indexer ? std::optional(l->indexer->top_k) : std::nullopt;
          softmax_.push_back({l->heads, 1, l->latent + l->rotary_dim, l->latent, {}, listed, released});
        }
      }
      graph_ += graph;
      if (n + 1 < with_state) state_graph_ += graph;
      else if (n + 1 == with_state && has_state) state_graph_ += state_graph;
      released += graph;
    }
  }
  graph_ += 2 * hidden_ * size_ + wide_;
  count_adapters(decoder);
  std::sort(softmax_.begin(), softmax_.end());
  softmax_.erase(std::unique(softmax_.begin(), softmax_.end()), softmax_.end());
}

// y + scale · B (A x): the graph keeps A x. Beside y there are its two products and their sum; backward, the scaled gradient of
// y, and two gradients of x that are added.
void TokenCosts::count_adapters(const model::Decoder& decoder) {
  if (decoder.adapters() == nullptr) return;
  int64_t forward = 0, backward = 0;
  for (const model::Adapter& adapter : decoder.adapters()->all) {
    const int64_t outputs = adapter.weight->shape.at(0), inputs = adapter.weight->shape.at(1);
    graph_ += decoder.adapters()->rank * size_;
    state_graph_ += decoder.adapters()->rank * size_;
    forward = std::max(forward, 3 * outputs * size_);
    backward = std::max(backward, (outputs + 2 * inputs) * size_);
  }
  forward_ += forward;
  backward_ += backward;
}

int64_t TokenCosts::head(int64_t tokens) const {
  const int64_t slice = std::min(tokens, logit_rows(vocab_)) * vocab_;
  const int64_t scores = 2 * slice * wide_;
  const int64_t product = size_ == wide_ ? 0 : slice * (wide_ + size_) + vocab_ * hidden_ * size_;
  return std::max(scores, product) + 2 * tokens * hidden_ * size_;
}

int64_t TokenCosts::scan_backward(int64_t tokens) const {
  int64_t widest = 0;
  for (const Scan& scan : scans_) widest = std::max(widest, std::min(tokens, scan.block_tokens) * scan.scratch);
  return widest;
}

int64_t TokenCosts::mixer_backward(int64_t tokens, int64_t past, int64_t adjoint_from) const {
  int64_t widest = 0;
  for (const Softmax& mixer : softmax_) {
    widest = std::max(widest, softmax_backward(mixer, tokens, past, adjoint_from) - tokens * mixer.released);
  }
  return widest;
}

int64_t TokenCosts::softmax_backward(const Softmax& m, int64_t tokens, int64_t past, int64_t adjoint_from) const {
  const int64_t queries = m.heads * m.key_dim, keys = m.kv_heads * (m.key_dim + m.value_dim);
  // Gradients of the queries (twice while they are summed), of the output, and of keys and values.
  const auto gradients = [&](int64_t of_past) { return (tokens * (3 * queries + keys) + of_past * keys) * size_; };
  if (m.listed) {
    return gradients(0) + sparse_attention_bytes(tokens, m.heads, m.key_dim, std::min(*m.listed, past + tokens), dtype_, c10::kCPU);
  }
  if (m.window && *m.window < past + tokens) {
    // Tile by tile, a few queries at a time; own and past keys are two calls.
    const int64_t rows = std::min(tokens, kWindowTile);
    const int64_t visible = std::max(std::min(tokens, *m.window + rows), std::min(past, *m.window));
    return tile_bytes(rows * m.heads, visible, dtype_) + gradients(std::min(past, visible));
  }
  const int64_t unwanted = std::min(past, adjoint_from), block = std::min(past - unwanted, kPastBlock);
  const bool flash = m.key_dim == m.value_dim;
  const int64_t scratch = flash ? flash_scratch_bytes(tokens, std::max(tokens, block), dtype_)
                                : tile_bytes(tokens * m.heads, std::max(tokens, block), dtype_);
  // Keys that want no adjoint go tile by tile.
  const int64_t queries_only = unwanted > 0 ? tile_bytes(tokens * m.heads, unwanted, dtype_) + 4 * tokens * queries * wide_ : 0;
  return std::max(scratch + gradients(block), queries_only);
}

}  // namespace longstraw
