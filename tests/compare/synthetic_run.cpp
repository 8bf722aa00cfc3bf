#include "tests/compare/synthetic_run.h"

#include <fmt/format.h>

#include <cmath>
#include <random>

#include "core/record/writer.h"

namespace longstraw::compare::testing {
namespace {

constexpr std::int64_t kHidden = 24, kKeyValue = 8, kMlp = 40, kVocabulary = 300;
constexpr std::int64_t kMembers = 4, kTokens = 6;

class Maker {
 public:
  explicit Maker(std::uint64_t seed) : generator_(seed) {}
  double normal() { return normal_(generator_); }
  Gradient gradient(const std::vector<std::int64_t>& shape, double scale) {
    Gradient g{shape, {}};
    std::int64_t elements = 1;
    for (const std::int64_t dim : shape) elements *= dim;
    for (std::int64_t i = 0; i < elements; ++i) g.values.push_back(scale * normal());
    return g;
  }
  std::int64_t token() { return static_cast<std::int64_t>(generator_() % kVocabulary); }

 private:
  std::mt19937_64 generator_;
  std::normal_distribution<double> normal_;
};

void add(SyntheticStep& step, Maker& maker, const std::string& name, const std::vector<std::int64_t>& shape, double response,
         double prompt) {
  Gradient whole = maker.gradient(shape, response);
  Gradient part = maker.gradient(shape, prompt);
  for (std::size_t i = 0; i < whole.values.size(); ++i) whole.values[i] += part.values[i];
  step.gradients[name] = std::move(whole);
  if (prompt != 0) step.prompt_part[name] = std::move(part);
}

void add_attention(SyntheticStep& step, Maker& maker, const std::string& layer, double scale, double lower, bool biases) {
  // Keys and values of prompt tokens: most of their gradient is the prompt's, in every layer.
  add(step, maker, layer + "self_attn.q_proj.weight", {kHidden, kHidden}, scale, scale * lower);
  add(step, maker, layer + "self_attn.k_proj.weight", {kKeyValue, kHidden}, 0.5 * scale, scale);
  add(step, maker, layer + "self_attn.v_proj.weight", {kKeyValue, kHidden}, 0.5 * scale, scale);
  add(step, maker, layer + "self_attn.o_proj.weight", {kHidden, kHidden}, scale, scale * lower);
  if (!biases) return;
  add(step, maker, layer + "self_attn.q_proj.bias", {kHidden}, scale, scale * lower);
  add(step, maker, layer + "self_attn.k_proj.bias", {kKeyValue}, 0.1 * scale, 0.1 * scale);
  add(step, maker, layer + "self_attn.v_proj.bias", {kKeyValue}, scale, scale);
}

void add_delta_rule(SyntheticStep& step, Maker& maker, const std::string& layer, double scale, double lower) {
  add(step, maker, layer + "linear_attn.in_proj_qkvz.weight", {2 * kHidden, kHidden}, scale, scale);
  add(step, maker, layer + "linear_attn.in_proj_ba.weight", {kKeyValue, kHidden}, scale, scale);
  add(step, maker, layer + "linear_attn.conv1d.weight", {kHidden, 1, 4}, scale, scale);
  add(step, maker, layer + "linear_attn.A_log", {kKeyValue}, scale, scale);
  add(step, maker, layer + "linear_attn.dt_bias", {kKeyValue}, scale, scale);
  add(step, maker, layer + "linear_attn.out_proj.weight", {kHidden, kHidden}, scale, scale * lower);
}

void add_layer(SyntheticStep& step, Maker& maker, std::int64_t index, const SyntheticOptions& options) {
  const bool last = index + 1 == options.layers;
  const std::string layer = fmt::format("model.layers.{}.", index);
  const double scale = 0.01 * (1 + 0.37 * static_cast<double>(index));
  // What acts after the last layer's state gets nothing from prompt positions.
  const double lower = last ? 0 : 0.6;
  if (options.recurrent && !last) {
    add_delta_rule(step, maker, layer, scale, lower);
  } else {
    add_attention(step, maker, layer, scale, lower, options.biases);
  }
  add(step, maker, layer + "input_layernorm.weight", {kHidden}, scale, 0.5 * scale);
  add(step, maker, layer + "post_attention_layernorm.weight", {kHidden}, scale, scale * lower);
  add(step, maker, layer + "mlp.gate_proj.weight", {kMlp, kHidden}, scale, scale * lower);
  add(step, maker, layer + "mlp.up_proj.weight", {kMlp, kHidden}, scale, scale * lower);
  add(step, maker, layer + "mlp.down_proj.weight", {kHidden, kMlp}, scale, scale * lower);
}

std::vector<core::record::ResponseRecord> make_responses(Maker& maker) {
  // Four members of one group with different rewards; advantages as grpo makes them.
  const double rewards[kMembers] = {1.0, 0.0, 0.25, 0.6};
  const double mean = 0.4625, deviation = 0.4328;
  std::vector<core::record::ResponseRecord> responses;
  for (std::int64_t m = 0; m < kMembers; ++m) {
    core::record::ResponseRecord r;
    r.prompt_id = "question";
    r.member = m;
    r.prompt_length = 500;
    r.last_prompt_token = 17;
    r.reward = rewards[m];
    r.advantage = (rewards[m] - mean) / (deviation + 1e-4);
    r.policy_logprobs.emplace();
    r.old_logprobs.emplace();
    for (std::int64_t t = 0; t < kTokens; ++t) {
      r.tokens.push_back(maker.token());
      r.mask.push_back(1);
      r.policy_logprobs->push_back(-0.2 - std::abs(maker.normal()));
      r.old_logprobs->push_back(r.policy_logprobs->back() - 0.05 - 0.02 * std::abs(maker.normal()));
    }
    responses.push_back(r);
  }
  return responses;
}

// d loss / d output matrix: at each position (softmax - one target) times the hidden state, weighted by the advantage.
Gradient output_matrix(Maker& maker, const std::vector<core::record::ResponseRecord>& responses, const SyntheticOptions& options) {
  Gradient g{{kVocabulary, kHidden}, std::vector<double>(kVocabulary * kHidden, 0.0)};
  for (const auto& r : responses) {
    const auto weight = options.member_weight.find(r.member);
    for (std::size_t t = 0; t < r.tokens.size(); ++t) {
      std::vector<double> probabilities(kVocabulary);
      double sum = 0;
      for (double& p : probabilities) sum += p = std::exp(1.5 * maker.normal());
      std::vector<double> hidden(kHidden);
      for (double& h : hidden) h = maker.normal();
      double factor = -r.advantage / (kTokens * kMembers);
      if (t == 0) factor *= options.first_weight;
      if (weight != options.member_weight.end()) factor *= weight->second;
      for (std::int64_t v = 0; v < kVocabulary; ++v) {
        const double error = (v == r.tokens[t] ? 1.0 : 0.0) - probabilities[static_cast<std::size_t>(v)] / sum;
        for (std::int64_t h = 0; h < kHidden; ++h)
          g.values[static_cast<std::size_t>(v * kHidden + h)] += factor * error * hidden[h];
      }
    }
  }
  return g;
}

}  // namespace

SyntheticStep synthetic_step(const SyntheticOptions& options) {
  Maker maker(options.seed);
  SyntheticStep step;
  step.responses = make_responses(maker);
  auto output = output_matrix(maker, step.responses, options);
  add(step, maker, "model.embed_tokens.weight", {kVocabulary, kHidden}, 0.02, 0.02);
  if (options.tied) {
    auto& embedding = step.gradients.at("model.embed_tokens.weight").values;
    for (std::size_t i = 0; i < embedding.size(); ++i) embedding[i] += output.values[i];
  } else {
    step.gradients["lm_head.weight"] = std::move(output);
  }
  add(step, maker, "model.norm.weight", {kHidden}, 0.02, 0);
  for (std::int64_t i = 0; i < options.layers; ++i) add_layer(step, maker, i, options);
  return step;
}

core::record::RecordHeader synthetic_header(const std::string& arm, const std::string& dtype) {
  core::record::RecordHeader header;
  header.arm = arm;
  header.dtype = dtype;
  header.device = "cpu";
  header.model_sha256 = "a1";
  header.data_sha256 = "b2";
  header.seed = 3;
  return header;
}

void add_rounding(SyntheticStep& step, double size, std::uint64_t seed) {
  Maker maker(seed);
  for (auto& [name, g] : step.gradients) {
    double squares = 0;
    for (const double v : g.values) squares += v * v;
    const double floor = std::sqrt(squares / static_cast<double>(g.values.size()));
    for (double& v : g.values) v += size * (v * maker.normal() + floor * maker.normal());
  }
  for (auto& r : step.responses) {
    for (double& v : *r.policy_logprobs) v += size * maker.normal();
  }
}

std::string write_run(const std::string& path, const core::record::RecordHeader& header, const std::vector<SyntheticStep>& steps) {
  core::record::RecordWriter writer(path, header, {.replace = true, .durable = false});
  for (std::size_t i = 0; i < steps.size(); ++i) {
    auto step = writer.begin_step(static_cast<std::int64_t>(i));
    for (const auto& [name, g] : steps[i].gradients) {
      if (header.dtype == "float64") {
        step.gradient(name, g.shape, g.values.data());
      } else {
        const std::vector<float> narrow(g.values.begin(), g.values.end());
        step.gradient(name, g.shape, narrow.data());
      }
    }
    for (auto response : steps[i].responses) step.response(std::move(response));
    step.objective({{"loss", 0.25}});
    step.memory({{"peak_bytes", 1000 + static_cast<std::int64_t>(i)}});
    step.timing({{"total", 2.0}, {"capture", 0.5}, {"replay", 1.0}, {"sweep", 0.5}});
    step.commit();
  }
  writer.close();
  return path;
}

}  // namespace longstraw::compare::testing
