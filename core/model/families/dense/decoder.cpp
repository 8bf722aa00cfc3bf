// S tokens, D hidden size, H query heads, G key/value heads, d head size.
#include "core/model/families/dense/dense.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>

namespace longstraw::core::model::dense {

namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kFinalNorm = "model.norm.weight";
constexpr const char* kOutput = "lm_head.weight";

std::string layer_prefix(int64_t n) { return fmt::format("model.layers.{}.", n); }

struct Affine {
  const Parameter* weight = nullptr;
  const Parameter* bias = nullptr;  // null: none
};

struct Layer {
  const Parameter* input_norm;
  Affine query, key, value, output;
  const Parameter* query_norm;  // null: none
  const Parameter* key_norm;
  const Parameter* mlp_norm;
  Affine gate, up, down;
};

class DenseDecoder final : public Decoder {
 public:
  explicit DenseDecoder(DecoderParts parts) {
    architecture_ = std::move(parts.architecture);
    parameters_ = std::move(parts.parameters);
    dtype_ = parts.dtype;
    device_ = parts.device;
    sha256_ = std::move(parts.sha256);

    std::map<std::string, const Parameter*> named;
    for (const auto& parameter : parameters_) named[parameter->name] = parameter.get();
    const auto get = [&](const std::string& name) {
      const auto found = named.find(name);
      return found == named.end() ? nullptr : found->second;
    };
    const auto affine = [&](const std::string& name) { return Affine{get(name + ".weight"), get(name + ".bias")}; };

    embedding_ = get(kEmbedding);
    final_norm_ = get(kFinalNorm);
    output_ = architecture_.tied_embeddings ? embedding_ : get(kOutput);
    for (int64_t n = 0; n < architecture_.layers; ++n) {
      const std::string prefix = layer_prefix(n);
      const std::string attention = prefix + "self_attn.";
      layers_.push_back({.input_norm = get(prefix + "input_layernorm.weight"),
                         .query = affine(attention + "q_proj"),
                         .key = affine(attention + "k_proj"),
                         .value = affine(attention + "v_proj"),
                         .output = affine(attention + "o_proj"),
                         .query_norm = get(attention + "q_norm.weight"),
                         .key_norm = get(attention + "k_norm.weight"),
                         .mlp_norm = get(prefix + "post_attention_layernorm.weight"),
                         .gate = affine(prefix + "mlp.gate_proj"),
                         .up = affine(prefix + "mlp.up_proj"),
                         .down = affine(prefix + "mlp.down_proj")});
    }
  }

  TokenPositions positions(const at::Tensor& positions_S, SequenceLengths lengths) const override {
    const at::Tensor here_S = positions_S.to(device_);
    return {here_S, rotary_table(rotary_frequencies(architecture_.rotary, lengths, dtype_), here_S, dtype_)};
  }

  at::Tensor embed(const at::Tensor& ids_S, Execution& execution) const override { return execution.embedding(ids_S, *embedding_); }

  at::Tensor layer(int64_t n, const at::Tensor& hidden_SD, const TokenPositions& where, Execution& execution) const override {
    const Layer& w = layers_.at(size_t(n));
    const at::Tensor normed_SD = execution.rms_norm(hidden_SD, *w.input_norm, architecture_.norm_eps);
    const at::Tensor query_SHd = rotated_heads(w.query, w.query_norm, architecture_.heads, normed_SD, where, execution);
    const at::Tensor key_SGd = rotated_heads(w.key, w.key_norm, architecture_.kv_heads, normed_SD, where, execution);
    const at::Tensor value_SGd = heads(w.value, architecture_.kv_heads, normed_SD, execution);

    const at::Tensor mixed_SHd = execution.attention(spec(n), query_SHd, key_SGd, value_SGd);
    const at::Tensor attended_SD = execution.linear(mixed_SHd.flatten(1), *w.output.weight, w.output.bias);
    const at::Tensor middle_SD = execution.add(hidden_SD, attended_SD);

    const at::Tensor mlp_input_SD = execution.rms_norm(middle_SD, *w.mlp_norm, architecture_.norm_eps);
    const at::Tensor gate_SI = execution.linear(mlp_input_SD, *w.gate.weight, w.gate.bias);
    const at::Tensor up_SI = execution.linear(mlp_input_SD, *w.up.weight, w.up.bias);
    const at::Tensor mlp_SD = execution.linear(execution.swiglu(gate_SI, up_SI), *w.down.weight, w.down.bias);
    return execution.add(middle_SD, mlp_SD);
  }

  void layer_state(int64_t n, const at::Tensor& hidden_SD, const TokenPositions& where, Execution& execution) const override {
    const Layer& w = layers_.at(size_t(n));
    const at::Tensor normed_SD = execution.rms_norm(hidden_SD, *w.input_norm, architecture_.norm_eps);
    const at::Tensor key_SGd = rotated_heads(w.key, w.key_norm, architecture_.kv_heads, normed_SD, where, execution);
    const at::Tensor value_SGd = heads(w.value, architecture_.kv_heads, normed_SD, execution);
    execution.keep_keys_values(spec(n), key_SGd, value_SGd);
  }

  at::Tensor final_norm(const at::Tensor& hidden_SD, Execution& execution) const override {
    return execution.rms_norm(hidden_SD, *final_norm_, architecture_.norm_eps);
  }

  const Parameter& output_weight() const override { return *output_; }

 private:
  AttentionSpec spec(int64_t n) const {
    return {.layer = n, .scale = std::pow(double(architecture_.head_dim), -0.5), .window = architecture_.window[size_t(n)]};
  }

  at::Tensor heads(const Affine& projection, int64_t count, const at::Tensor& normed_SD, Execution& execution) const {
    return execution.linear(normed_SD, *projection.weight, projection.bias)
        .view({normed_SD.size(0), count, architecture_.head_dim});
  }

  at::Tensor rotated_heads(const Affine& projection, const Parameter* norm, int64_t count, const at::Tensor& normed_SD,
                           const TokenPositions& where, Execution& execution) const {
    at::Tensor heads_Shd = heads(projection, count, normed_SD, execution);
    if (norm) heads_Shd = execution.rms_norm(heads_Shd, *norm, architecture_.norm_eps);
    return execution.rotate(heads_Shd, where.rotary);
  }

  const Parameter* embedding_ = nullptr;
  const Parameter* final_norm_ = nullptr;
  const Parameter* output_ = nullptr;
  std::vector<Layer> layers_;
};

}  // namespace

std::vector<ParameterShape> parameter_shapes(const Architecture& a) {
  std::vector<ParameterShape> shapes;
  const auto affine = [&](const std::string& name, int64_t out, int64_t in, bool bias) {
    shapes.push_back({name + ".weight", {out, in}});
    if (bias) shapes.push_back({name + ".bias", {out}});
  };
  const int64_t query_size = a.heads * a.head_dim;
  const int64_t key_size = a.kv_heads * a.head_dim;

  shapes.push_back({kEmbedding, {a.vocab, a.hidden}});
  for (int64_t n = 0; n < a.layers; ++n) {
    const std::string prefix = layer_prefix(n);
    shapes.push_back({prefix + "input_layernorm.weight", {a.hidden}});
    affine(prefix + "self_attn.q_proj", query_size, a.hidden, a.query_key_value_bias);
    affine(prefix + "self_attn.k_proj", key_size, a.hidden, a.query_key_value_bias);
    affine(prefix + "self_attn.v_proj", key_size, a.hidden, a.query_key_value_bias);
    affine(prefix + "self_attn.o_proj", a.hidden, query_size, a.attention_output_bias);
    if (a.query_key_norm) {
      shapes.push_back({prefix + "self_attn.q_norm.weight", {a.head_dim}});
      shapes.push_back({prefix + "self_attn.k_norm.weight", {a.head_dim}});
    }
    shapes.push_back({prefix + "post_attention_layernorm.weight", {a.hidden}});
    affine(prefix + "mlp.gate_proj", a.intermediate, a.hidden, a.mlp_bias);
    affine(prefix + "mlp.up_proj", a.intermediate, a.hidden, a.mlp_bias);
    affine(prefix + "mlp.down_proj", a.hidden, a.intermediate, a.mlp_bias);
  }
  shapes.push_back({kFinalNorm, {a.hidden}});
  if (!a.tied_embeddings) shapes.push_back({kOutput, {a.vocab, a.hidden}});
  return shapes;
}

std::vector<LayerState> layer_states(const Architecture& a) {
  std::vector<LayerState> states;
  for (const auto& window : a.window) {
    states.push_back({window ? fmt::format("sliding window of {}", *window) : "full attention", 2 * a.kv_heads * a.head_dim});
  }
  return states;
}

std::unique_ptr<Decoder> build(DecoderParts parts) { return std::make_unique<DenseDecoder>(std::move(parts)); }

}  // namespace longstraw::core::model::dense
