// What the block asks of an execution: rotations, the selection's inputs, and what stays for later tokens.
#include "core/model/blocks/latent_attention.h"

#include "core/model/rotary.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

namespace longstraw::core::model {
namespace {

// Textbook operations where there are any; remembers what it was asked for.
class Listener final : public Execution {
 public:
  at::Tensor attention(const AttentionSpec&, const at::Tensor&, const at::Tensor&, const at::Tensor&) override { refuse(); }
  void keep_keys_values(const AttentionSpec&, const at::Tensor&, const at::Tensor&) override { refuse(); }
  at::Tensor latent_attention(const LatentSpec&, const at::Tensor& query_plain, const at::Tensor& query_rotary,
                              const at::Tensor& latent, const at::Tensor& rotary_key, const Parameter& kv_b) override {
    plain = query_plain, rotary = query_rotary, this->latent = latent, key = rotary_key;
    const int64_t heads = query_plain.size(1), both = kv_b.shape[0] / heads, width = both - query_plain.size(2);
    return at::linear(latent, kv_b.value).unflatten(-1, {heads, both}).narrow(-1, query_plain.size(2), width);
  }
  void keep_latents(const LatentSpec&, const at::Tensor& latent, const at::Tensor& rotary_key) override {
    kept_latent = latent, kept_key = rotary_key;
  }
  void select_keys(const IndexerSpec& spec, const at::Tensor& query, const at::Tensor& key, const at::Tensor& weight) override {
    ++selections;
    top_k = spec.top_k, index_query = query, index_key = key, index_weight = weight;
  }
  void keep_index_keys(const IndexerSpec&, const at::Tensor& key) override { kept_index_key = key; }
  at::Tensor causal_convolution(int64_t, const at::Tensor&, const Parameter&, const Parameter*) override { refuse(); }
  at::Tensor gated_delta_rule(int64_t, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&) override {
    refuse();
  }
  at::Tensor state_space(int64_t, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const at::Tensor&) override {
    refuse();
  }
  at::Tensor choose_experts(int64_t, const at::Tensor&, int64_t) override { refuse(); }
  at::Tensor experts(const at::Tensor&, const at::Tensor&, const at::Tensor&, const ExpertWeights&) override { refuse(); }

  at::Tensor plain, rotary, latent, key, index_query, index_key, index_weight, kept_latent, kept_key, kept_index_key;
  int64_t selections = 0, top_k = 0;

 private:
  [[noreturn]] static void refuse() { throw std::logic_error("not an operation of latent attention"); }
};

constexpr int64_t kHidden = 16, kTokens = 7;
const LatentAttentionShape kShape{.heads = 3,
                                  .query_rank = 12,
                                  .latent = 8,
                                  .rotary_dim = 4,
                                  .plain_dim = 6,
                                  .value_dim = 5,
                                  .scale = 0.5,
                                  .indexer = IndexerShape{.heads = 2, .head_dim = 6, .top_k = 3}};

struct Model {
  Model(const LatentAttentionShape& shape, at::ScalarType dtype) : block(builder, "attn.", 0, kHidden, shape) {
    at::manual_seed(5);
    for (const auto& parameter : builder.parameters) {
      parameter->value = at::randn(parameter->shape, at::kDouble).to(dtype).set_requires_grad(true);
    }
    x_SD = at::randn({kTokens, kHidden}, at::kDouble).to(dtype).set_requires_grad(true);
    const Rotary rotary{.dims = shape.rotary_dim};
    const at::Tensor positions_S = at::arange(3, 3 + kTokens);
    where = {positions_S, rotary_table(rotary_frequencies(rotary, {10, 10}, dtype), positions_S, dtype)};
  }
  Parameter& parameter(const std::string& name) const {
    for (const auto& parameter : builder.parameters) {
      if (parameter->name == name) return *parameter;
    }
    throw std::out_of_range(name);
  }
  Builder builder;
  LatentAttentionBlock block;
  at::Tensor x_SD;
  TokenPositions where;
};

// Pairs (2i, 2i + 1) of the first r of each head's rows to (i, i + r/2).
at::Tensor deinterleaved(const at::Tensor& weight_OI, int64_t heads, int64_t before, int64_t r) {
  const at::Tensor by_head = weight_OI.detach().unflatten(0, {heads, -1}).clone();
  const at::Tensor old = by_head.clone();
  for (int64_t i = 0; i < r / 2; ++i) {
    by_head.select(1, before + i).copy_(old.select(1, before + 2 * i));
    by_head.select(1, before + i + r / 2).copy_(old.select(1, before + 2 * i + 1));
  }
  return by_head.flatten(0, 1).set_requires_grad(true);
}

// Rotating pairs of neighbours is rotating halves after the rows that make them changed places.
TEST(LatentAttention, InterleavedRotationIsHalfRotationOfPermutedWeights) {
  LatentAttentionShape interleaved = kShape, halves = kShape;
  interleaved.interleaved_rotary = interleaved.indexer->interleaved_rotary = true;
  halves.interleaved_rotary = halves.indexer->interleaved_rotary = false;
  Model a(interleaved, at::kDouble), b(halves, at::kDouble);
  Listener of_a, of_b, unpermuted;
  a.block.output(a.x_SD, a.where, of_a);
  b.block.output(b.x_SD, b.where, unpermuted);
  const auto permute = [&](const std::string& name, int64_t heads, int64_t before) {
    b.parameter(name).value = deinterleaved(b.parameter(name).value, heads, before, 4);
  };
  permute("attn.q_b_proj.weight", 3, 6);
  permute("attn.kv_a_proj_with_mqa.weight", 1, 8);
  permute("attn.indexer.wq_b.weight", 2, 0);
  permute("attn.indexer.wk.weight", 1, 0);
  permute("attn.indexer.k_norm.weight", 1, 0);
  permute("attn.indexer.k_norm.bias", 1, 0);
  b.block.output(b.x_SD, b.where, of_b);
  // Both sum the same products in the same order but for the norm's mean, which sees them in another.
  const auto close = [](const at::Tensor& x, const at::Tensor& y) { return at::allclose(x, y, 1e-14, 1e-14); };
  EXPECT_TRUE(close(of_a.rotary, of_b.rotary));
  EXPECT_TRUE(close(of_a.key, of_b.key));
  EXPECT_TRUE(close(of_a.index_query, of_b.index_query));
  EXPECT_TRUE(close(of_a.index_key, of_b.index_key));
  EXPECT_FALSE(close(of_a.rotary, unpermuted.rotary));
  EXPECT_FALSE(close(of_a.index_key, unpermuted.index_key));
  EXPECT_TRUE(at::equal(of_a.plain, of_b.plain));
}

TEST(LatentAttention, TheIndexerSeesConstantsAndScalesItsWeightsWide) {
  Model m(kShape, at::kBFloat16);
  Listener heard;
  m.block.output(m.x_SD, m.where, heard);
  EXPECT_EQ(heard.top_k, 3);
  for (const at::Tensor& t : {heard.index_query, heard.index_key, heard.index_weight}) EXPECT_FALSE(t.requires_grad());
  EXPECT_TRUE(heard.plain.requires_grad() && heard.latent.requires_grad() && heard.key.requires_grad());
  EXPECT_EQ(heard.index_key.scalar_type(), at::kBFloat16) << "it is kept with the prompt in the model's dtype";
  EXPECT_EQ(heard.index_weight.scalar_type(), at::kFloat);
  const at::Tensor weights = m.parameter("attn.indexer.weights_proj.weight").value.detach().to(at::kFloat);
  const at::Tensor wanted = at::linear(m.x_SD.detach().to(at::kFloat), weights) * (std::pow(2.0, -0.5) * std::pow(6.0, -0.5));
  EXPECT_TRUE(at::equal(heard.index_weight, wanted));
}

TEST(LatentAttention, WhatIsKeptIsWhatWasAttendedTo) {
  Model m(kShape, at::kDouble);
  Listener heard;
  m.block.output(m.x_SD, m.where, heard);
  m.block.state(m.x_SD, m.where, heard);
  EXPECT_TRUE(at::equal(heard.kept_latent, heard.latent));
  EXPECT_TRUE(at::equal(heard.kept_key, heard.key));
  EXPECT_TRUE(at::equal(heard.kept_index_key, heard.index_key));
  EXPECT_FALSE(heard.kept_index_key.requires_grad());
  EXPECT_TRUE(heard.kept_latent.requires_grad());
  ASSERT_EQ(m.builder.states.size(), 2u);
  EXPECT_EQ(m.builder.states[0].rows[0].width, 12);
  EXPECT_TRUE(m.builder.states[0].rows[0].adjoint);
  EXPECT_EQ(m.builder.states[1].rows[0].width, 6);
  EXPECT_FALSE(m.builder.states[1].rows[0].adjoint);
  // After the norm, whose eps no key of a config reaches.
  const auto& a = m.parameter("attn.kv_a_proj_with_mqa.weight").value;
  const at::Tensor c = at::linear(m.x_SD, a).narrow(-1, 0, 8);
  const at::Tensor normed = c * at::rsqrt(c.square().mean(-1, true) + 1e-6) * m.parameter("attn.kv_a_layernorm.weight").value;
  EXPECT_TRUE(at::allclose(heard.latent, normed, 1e-14, 1e-14));
}

TEST(LatentAttention, ASharedLayerAsksForNoSelection) {
  LatentAttentionShape shape = kShape;
  shape.indexer->own = false;
  Model shared(shape, at::kDouble);
  Listener heard;
  shared.block.output(shared.x_SD, shared.where, heard);
  shared.block.state(shared.x_SD, shared.where, heard);
  EXPECT_EQ(heard.selections, 0);
  EXPECT_FALSE(heard.kept_index_key.defined());
  EXPECT_EQ(shared.builder.states.size(), 1u);
  for (const auto& parameter : shared.builder.parameters) EXPECT_EQ(parameter->name.find("indexer"), std::string::npos);
}

TEST(LatentAttention, WithoutAQueryRankQueriesComeFromTheInput) {
  LatentAttentionShape shape = kShape;
  shape.query_rank = std::nullopt;
  shape.indexer = std::nullopt;
  shape.bias = true;
  Model m(shape, at::kDouble);
  Listener heard;
  const at::Tensor y_SD = m.block.output(m.x_SD, m.where, heard);
  EXPECT_EQ(y_SD.sizes(), at::IntArrayRef({kTokens, kHidden}));
  const at::Tensor query = at::linear(m.x_SD, m.parameter("attn.q_proj.weight").value).unflatten(-1, {3, 10});
  EXPECT_TRUE(at::equal(heard.plain, query.narrow(-1, 0, 6)));
  EXPECT_EQ(m.parameter("attn.kv_a_proj_with_mqa.bias").shape, Shape{12});
  EXPECT_EQ(m.parameter("attn.o_proj.bias").shape, Shape{kHidden});
}

}  // namespace
}  // namespace longstraw::core::model
