// Causes that show in a trace of the forward pass (docs/record.md): the first point at which two runs part names the operation
// that computes something else. Gradients can't tell: once a forward pass differs, all of them do, by about as much.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "compare/deviations.h"
#include "compare/mixers.h"
#include "compare/names.h"

namespace longstraw::compare {
namespace {

using core::record::ResponseRecord;

// "0007.delta_rule"
std::string operation_of(const std::string& point) { return point.substr(std::min(point.find('.'), point.size() - 1) + 1); }

bool is_choice(const std::string& operation) { return operation == "keys" || operation == "experts"; }

// Rounding of a projection of what a point computes, in multiples of the point's root mean square.
double tolerance(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64: return 1e-8;
    case Dtype::kFloat32: return 1e-3;
    case Dtype::kBfloat16: return 0.1;
  }
  return 0;
}

// Rounding flips a near tie now and then, which then changes all that this token computes.
double share_of_flips(Dtype dtype) { return dtype == Dtype::kFloat64 ? 0 : 0.1; }

struct PointDifference {
  std::size_t tokens = 0, off = 0;
};

PointDifference difference_at(const std::string& point, const std::vector<ResponseRecord>& b, const std::vector<ResponseRecord>& a,
                              Dtype dtype) {
  double squares = 0;
  PointDifference result;
  for (const auto& r : b) {
    for (const double v : r.trace.at(point)) squares += v * v;
    result.tokens += r.trace.at(point).size();
  }
  const double size = result.tokens == 0 ? 0 : std::sqrt(squares / static_cast<double>(result.tokens));
  const double allowed = is_choice(operation_of(point)) ? 0 : tolerance(dtype) * size;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const auto &x = b[i].trace.at(point), &y = a[i].trace.at(point);
    for (std::size_t t = 0; t < x.size(); ++t) result.off += !(std::abs(x[t] - y[t]) <= allowed);
  }
  return result;
}

bool same_points(const std::vector<ResponseRecord>& b, const std::vector<ResponseRecord>& a) {
  const auto equal = [](const auto& x, const auto& y) { return x.first == y.first && x.second.size() == y.second.size(); };
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (!std::equal(b[i].trace.begin(), b[i].trace.end(), a[i].trace.begin(), a[i].trace.end(), equal)) return false;
  }
  return !b.front().trace.empty();
}

struct Cause {
  std::string name;
  std::string what;
};

Cause cause_of_mixer(const StepMeasure& measure, std::int64_t layer) {
  if (const auto mixer = recurrent_mixer(measure, layer)) {
    const bool delta = mixer->prefix == "linear_attn.";
    return {delta ? "wrong_delta_rule" : "wrong_state_space", fmt::format("the recurrent mixer of layer {}", layer)};
  }
  const auto parameters = parameters_of_layer(measure, layer);
  const bool sparse = std::any_of(parameters.begin(), parameters.end(), [](const auto* p) { return is_indexer(kind_of(p->name)); });
  if (sparse)
    return {"wrong_sparse_attention", fmt::format("the sparse attention of layer {}: its selection or what it reads", layer)};
  return {"wrong_attention", fmt::format("the attention of layer {}", layer)};
}

Cause cause_of_mlp(const StepMeasure& measure, std::int64_t layer) {
  const auto parameters = parameters_of_layer(measure, layer);
  const bool routed = std::any_of(parameters.begin(), parameters.end(), [](const auto* p) { return is_routed(kind_of(p->name)); });
  return {routed ? "wrong_experts" : "wrong_mlp", fmt::format("the {} of layer {}", routed ? "experts" : "MLP", layer)};
}

// The residual stream is added to once a layer, or twice: the mixer, then the MLP.
Cause cause_of_add(const StepMeasure& measure, std::size_t index, std::size_t adds) {
  const std::size_t layers = measure.by_layer.size();
  if (adds < layers || layers == 0 || adds % layers != 0 || adds / layers > 2)
    return {"wrong_block", fmt::format("block {}", index)};
  const std::size_t per_layer = adds / layers;
  const auto layer = std::next(measure.by_layer.begin(), static_cast<std::ptrdiff_t>(index / per_layer))->first;
  const auto parameters = parameters_of_layer(measure, layer);
  const bool mixes = std::any_of(parameters.begin(), parameters.end(), [](const auto* p) {
    const std::string kind = kind_of(p->name);
    return makes_state(kind) && kind.find("norm") == std::string::npos;
  });
  return index % per_layer == 0 && mixes ? cause_of_mixer(measure, layer) : cause_of_mlp(measure, layer);
}

// Of these every kind of block is made: which block it is tells more.
bool is_common(const std::string& operation) {
  return operation == "add" || operation == "linear" || operation == "rms_norm" || operation == "swiglu";
}

Cause cause_of(const std::string& operation, const StepMeasure& measure, std::size_t adds_before, std::size_t adds) {
  if (is_common(operation) && adds > 0 && adds_before == adds) return {"wrong_final_norm", "the norm after the last layer"};
  if (is_common(operation)) return cause_of_add(measure, adds_before, adds);
  if (operation == "embedding") return {"stale_weights", "the embedding: other weights, or other tokens"};
  if (operation == "rotate") return {"wrong_rotation", "the rotation of queries and keys"};
  if (operation == "keys") {
    return {"wrong_key_selection", "which keys sparse attention selects, as when top-k is local to a shard or block"};
  }
  if (operation == "delta_rule") {
    return {"wrong_delta_rule", "the delta rule, as when decay comes after the step or after its error term"};
  }
  if (operation == "state_space") return {"wrong_state_space", "the state space scan"};
  if (operation == "experts") return {"wrong_routes", "which experts tokens are sent to"};
  if (operation == "routing_weights") {
    return {"wrong_routing_weights",
            "the weights of the experts, which agree themselves, as when the balancing bias is in the weights"};
  }
  if (operation == "mixed_experts") return {"wrong_experts", "what the chosen experts compute"};
  if (operation == "latent_attention") return {"wrong_attention", "latent attention"};
  return {"wrong_" + operation, operation};
}

}  // namespace

bool find_in_trace(Deviations& d, const std::vector<ResponseRecord>& b, const std::vector<ResponseRecord>& a) {
  if (b.empty() || !same_points(b, a)) return false;
  const Dtype dtype = d.input().bounds.dtype();
  const auto& points = b.front().trace;
  const auto adds = static_cast<std::size_t>(
      std::count_if(points.begin(), points.end(), [](const auto& p) { return operation_of(p.first) == "add"; }));
  std::size_t adds_before = 0;
  for (const auto& [point, values] : points) {
    const std::string operation = operation_of(point);
    const auto difference = difference_at(point, b, a, dtype);
    if (static_cast<double>(difference.off) <= share_of_flips(dtype) * static_cast<double>(difference.tokens)) {
      adds_before += operation == "add";
      continue;
    }
    const Cause cause = cause_of(operation, d.input().measure, adds_before, adds);
    std::vector<std::string> names;
    for (const auto* parameter : d.open()) names.push_back(parameter->name);
    d.add(cause.name,
          fmt::format("the forward pass parts from the reference's at point {} ({} of {} tokens), all before it agrees: {}", point,
                      difference.off, difference.tokens, cause.what),
          names);
    return true;
  }
  return false;
}

}  // namespace longstraw::compare
