#include "core/model/blocks/latent_attention.h"

#include "core/device/device.h"

#include <ATen/ATen.h>

#include <cmath>

namespace longstraw::core::model {

namespace {

// Those of the constructors in transformers: no key of config.json reaches them.
constexpr double kRankNormEps = 1e-6;
constexpr double kIndexKeyNormEps = 1e-6;

// Rotates the first r dimensions of x [S, heads, d]. Interleaved pairs (0, 1), (2, 3), … become [even | odd] and stay so:
// query and key agree about it, and a dot product does not see the order of its terms.
at::Tensor rotated(const at::Tensor& x_Shd, bool interleaved, const RotaryTable& table, Execution& execution) {
  if (!interleaved) return execution.rotate(x_Shd, table);
  const int64_t r = table.cos_Sr.size(-1), rest = x_Shd.size(-1) - r;
  const at::Tensor pairs_Sh = x_Shd.narrow(-1, 0, r).unflatten(-1, {r / 2, 2});
  const at::Tensor halves_Shr = at::cat({pairs_Sh.select(-1, 0), pairs_Sh.select(-1, 1)}, -1);
  return execution.rotate(rest == 0 ? halves_Shr : at::cat({halves_Shr, x_Shd.narrow(-1, r, rest)}, -1), table);
}

}  // namespace

LatentAttentionBlock::LatentAttentionBlock(Builder& builder, const std::string& prefix, int64_t layer, int64_t hidden,
                                           const LatentAttentionShape& shape)
    : shape_(shape) {
  const auto affine = [&](const char* name, int64_t out, int64_t in) {
    const Parameter* weight = builder.parameter(prefix + name + ".weight", {out, in});
    return Affine{weight, builder.parameter_if(shape.bias, prefix + name + ".bias", {out})};
  };
  const int64_t queries = shape.heads * (shape.plain_dim + shape.rotary_dim);
  if (shape.query_rank) {
    query_a_ = affine("q_a_proj", *shape.query_rank, hidden);
    query_a_norm_ = builder.parameter(prefix + "q_a_layernorm.weight", {*shape.query_rank});
    query_ = builder.parameter(prefix + "q_b_proj.weight", {queries, *shape.query_rank});
  } else {
    query_ = builder.parameter(prefix + "q_proj.weight", {queries, hidden});
  }
  latent_ = affine("kv_a_proj_with_mqa", shape.latent + shape.rotary_dim, hidden);
  latent_norm_ = builder.parameter(prefix + "kv_a_layernorm.weight", {shape.latent});
  kv_b_ = builder.parameter(prefix + "kv_b_proj.weight", {shape.heads * (shape.plain_dim + shape.value_dim), shape.latent});
  output_ = affine("o_proj", hidden, shape.heads * shape.value_dim);
  const bool sparse = shape.indexer.has_value();
  const int64_t slot = builder.state({.layer = layer,
                                      .kind = sparse ? "sparse latent attention" : "latent attention",
                                      .window = {},
                                      .rows = {{"latent", 1, shape.latent + shape.rotary_dim}},
                                      .carried = {}});
  spec_ = {.slot = slot, .scale = shape.scale, .sparse = sparse};
  if (!sparse || !shape.indexer->own) return;

  const IndexerShape& indexer = *shape.indexer;
  const std::string inner = prefix + "indexer.";
  indexer_ =
      Indexer{.query_b = builder.parameter(inner + "wq_b.weight", {indexer.heads * indexer.head_dim, shape.query_rank.value()}),
              .key = builder.parameter(inner + "wk.weight", {indexer.head_dim, hidden}),
              .key_norm = builder.parameter(inner + "k_norm.weight", {indexer.head_dim}),
              .key_norm_bias = builder.parameter(inner + "k_norm.bias", {indexer.head_dim}),
              .weights = builder.parameter(inner + "weights_proj.weight", {indexer.heads, hidden}),
              .spec = {.slot = builder.state({.layer = layer,
                                              .kind = "sparse indexer",
                                              .window = {},
                                              .rows = {{"index_key", 1, indexer.head_dim, /*adjoint=*/false}},
                                              .carried = {}}),
                       .top_k = indexer.top_k}};
}

at::Tensor LatentAttentionBlock::query_rank(const at::Tensor& x_SD, Execution& execution) const {
  if (query_a_norm_ == nullptr) return x_SD;
  return execution.rms_norm(execution.linear(x_SD, *query_a_.weight, query_a_.bias), *query_a_norm_, kRankNormEps);
}

LatentAttentionBlock::Latents LatentAttentionBlock::latents(const at::Tensor& x_SD, const TokenPositions& where,
                                                            Execution& execution) const {
  const at::Tensor both_S = execution.linear(x_SD, *latent_.weight, latent_.bias);
  const at::Tensor key_S1r = both_S.narrow(-1, shape_.latent, shape_.rotary_dim).unsqueeze(1);
  return {execution.rms_norm(both_S.narrow(-1, 0, shape_.latent), *latent_norm_, kRankNormEps),
          rotated(key_S1r, shape_.interleaved_rotary, where.rotary, execution).squeeze(1)};
}

at::Tensor LatentAttentionBlock::index_key(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const {
  const at::Tensor key_Sd = execution.linear(x_SD, *indexer_->key, nullptr);
  const at::Tensor normed_Sd = at::layer_norm(key_Sd, {shape_.indexer->head_dim}, execution.value(*indexer_->key_norm),
                                              execution.value(*indexer_->key_norm_bias), kIndexKeyNormEps);
  return rotated(normed_Sd.unsqueeze(1), shape_.indexer->interleaved_rotary, where.rotary, execution).squeeze(1);
}

void LatentAttentionBlock::select(const at::Tensor& x_SD, const at::Tensor& query_rank_Sq, const TokenPositions& where,
                                  Execution& execution) const {
  const at::NoGradGuard constant;
  const IndexerShape& indexer = *shape_.indexer;
  const at::Tensor query_Shd =
      execution.linear(query_rank_Sq, *indexer_->query_b, nullptr).view({x_SD.size(0), indexer.heads, indexer.head_dim});
  // transformers keeps this one projection in float32 in every model.
  const at::ScalarType wide = device::accumulation_dtype(x_SD.scalar_type());
  const at::Tensor weight_Sh = at::linear(x_SD.to(wide), execution.value(*indexer_->weights).to(wide));
  const double scale = std::pow(double(indexer.heads), -0.5) * std::pow(double(indexer.head_dim), -0.5);
  execution.select_keys(indexer_->spec, rotated(query_Shd, indexer.interleaved_rotary, where.rotary, execution),
                        index_key(x_SD, where, execution), weight_Sh * scale);
}

at::Tensor LatentAttentionBlock::output(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const {
  const at::Tensor query_rank_Sq = query_rank(x_SD, execution);
  const at::Tensor query_SHd =
      execution.linear(query_rank_Sq, *query_, nullptr).view({x_SD.size(0), shape_.heads, shape_.plain_dim + shape_.rotary_dim});
  const at::Tensor query_plain_SHn = query_SHd.narrow(-1, 0, shape_.plain_dim);
  const at::Tensor query_rotary_SHr =
      rotated(query_SHd.narrow(-1, shape_.plain_dim, shape_.rotary_dim), shape_.interleaved_rotary, where.rotary, execution);
  const auto [latent_Sl, rotary_key_Sr] = latents(x_SD, where, execution);
  if (indexer_) select(x_SD, query_rank_Sq, where, execution);
  const at::Tensor mixed_SHv =
      execution.latent_attention(spec_, query_plain_SHn, query_rotary_SHr, latent_Sl, rotary_key_Sr, *kv_b_);
  return execution.linear(mixed_SHv.flatten(1), *output_.weight, output_.bias);
}

void LatentAttentionBlock::state(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const {
  const auto [latent_Sl, rotary_key_Sr] = latents(x_SD, where, execution);
  execution.keep_latents(spec_, latent_Sl, rotary_key_Sr);
  if (!indexer_) return;
  const at::NoGradGuard constant;
  execution.keep_index_keys(indexer_->spec, index_key(x_SD, where, execution));
}

}  // namespace longstraw::core::model
