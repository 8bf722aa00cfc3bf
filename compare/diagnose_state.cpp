// Causes that show in the last layer that makes a state of one kind: what acts after that state agrees exactly, and so does each
// parameter whose gradient does not need the part of the state's adjoint that is missing. Below, everything deviates.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include "compare/deviations.h"
#include "compare/mixers.h"
#include "compare/names.h"

namespace longstraw::compare {
namespace {

constexpr double kMostLayers = 0.8;
// A state computed again with other values keeps the length of its gradient about; one that lost its prompt does not.
constexpr double kShortest = 0.8, kLongest = 1.25;
// How much more the experts deviate than what runs for every token in the same layer, where only routes changed.
constexpr double kExpertExcess = 1.2;

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

bool any_deviates(const Deviations& d, const Parameters& parameters) {
  return std::any_of(parameters.begin(), parameters.end(), [&](const auto* p) { return d.deviates(p->name); });
}

std::vector<std::string> open_names(const Deviations& d) {
  std::vector<std::string> names;
  for (const auto* p : d.open()) names.push_back(p->name);
  return names;
}

// A cut is what these arms are for: what they lose is no fault of an adjoint.
bool cuts_the_prompt(const Deviations& d) {
  const auto& arm = d.input().candidate.header().arm;
  return arm == "detached" || arm == "tail";
}

bool is_state_weight(const std::string& kind) { return makes_state(kind) && !contains(kind, "norm"); }

// Whether the gradient is right in all that acts after the state of `layer`: the layers above, the final norm, the output matrix.
bool above_agrees(const Deviations& d, std::int64_t layer) {
  std::size_t agreeing = 0;
  for (const auto& p : d.input().measure.parameters) {
    const auto own = layer_of(p.name);
    const bool above = own ? *own > layer : contains(p.name, "norm") || contains(p.name, "lm_head");
    if (!above) continue;
    if (d.deviates(p.name)) return false;
    ++agreeing;
  }
  return agreeing > 0;
}

// The same in `layer` itself: nothing but what makes its state deviates.
bool readers_agree(const Deviations& d, std::int64_t layer) {
  for (const auto* p : parameters_of_layer(d.input().measure, layer)) {
    if (!makes_state(kind_of(p->name)) && d.deviates(p->name)) return false;
  }
  return true;
}

template <class Find>
auto last_with(const Deviations& d, Find find) -> decltype(find(d.input().measure, 0)) {
  const auto& layers = d.input().measure.by_layer;
  for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
    if (auto found = find(d.input().measure, layer->first)) return found;
  }
  return std::nullopt;
}

bool rows_agree(const Deviations& d, const ParameterMeasure& p, const std::vector<RowRange>& rows) {
  return !p.statistics.estimated && rows_error(d.input(), p, rows) <= d.tolerance(p.name);
}

// --- gated delta rule and Mamba-2

std::optional<bool> window_gradient_arrives(const Deviations& d, const RecurrentMixer& mixer) {
  if (mixer.window_input == nullptr || mixer.window_input->statistics.estimated) return std::nullopt;
  return std::any_of(mixer.window_readers.begin(), mixer.window_readers.end(),
                     [&](const auto& rows) { return rows_agree(d, *mixer.window_input, rows); });
}

bool has_agreeing_attention_from(const Deviations& d, std::int64_t first) {
  std::size_t found = 0;
  for (const auto& [layer, statistics] : d.input().measure.by_layer) {
    if (layer < first) continue;
    const auto attention = attention_mixer(d.input().measure, layer);
    const auto latent = latent_mixer(d.input().measure, layer);
    if (!attention && !latent) continue;
    ++found;
    if (attention && any_deviates(d, {attention->key, attention->value})) return false;
    if (latent && any_deviates(d, {latent->down, latent->norm})) return false;
  }
  return found > 0;
}

bool find_recurrent(Deviations& d) {
  const auto mixer = last_with(d, recurrent_mixer);
  if (!mixer || !above_agrees(d, mixer->layer) || any_deviates(d, mixer->readers)) return false;
  const bool convolution = any_deviates(d, mixer->convolution), decay = any_deviates(d, mixer->decay);
  if (!convolution && !decay && any_deviates(d, mixer->input)) {
    d.add("missing_convolution_adjoint",
          fmt::format("layer {}: the convolution and its decay agree, what feeds the convolution's window does not: "
                      "the window's gradient does not reach the prompt",
                      mixer->layer),
          open_names(d));
    return true;
  }
  if (!decay || cuts_the_prompt(d)) return false;
  const auto window = window_gradient_arrives(d, *mixer);
  const bool attention = has_agreeing_attention_from(d, mixer->layer);
  if (!attention && window != true) return false;  // nothing that keeps its gradient: the whole prompt is cut
  d.add("dropped_recurrent_adjoint",
        fmt::format(
            "layer {}: decay and what writes the recurrent state deviate ({}), what only reads it agrees{}{}: the gradient of "
            "the recurrent state does not reach the prompt",
            mixer->layer, listed({mixer->decay.front()->name, mixer->input.front()->name}),
            attention ? ", and so do the keys and values of attention" : "",
            window == true    ? "; that of the convolution's window does"
            : window == false ? "; that of the convolution's window does not either"
                              : ""),
        open_names(d));
  return true;
}

// --- latent attention

bool find_latent(Deviations& d) {
  const auto mixer = last_with(d, latent_mixer);
  if (!mixer) return false;
  const auto open = d.open();
  const bool only_expansion = std::all_of(open.begin(), open.end(), [](const auto* p) { return contains(p->name, "kv_b_proj"); });
  if (only_expansion) {
    std::size_t layers = 0;
    for (const auto& [layer, statistics] : d.input().measure.by_layer) layers += latent_mixer(d.input().measure, layer).has_value();
    if (static_cast<double>(open.size()) < kMostLayers * static_cast<double>(layers)) return false;
    d.add("missing_latent_expansion_gradient",
          fmt::format("only kv_b_proj deviates, in {} of {} layers: prompt positions give it no gradient, {}", open.size(), layers,
                      cuts_the_prompt(d) ? "as when the state is cut at the expanded keys and values instead of the latent"
                                         : "although the latent's own gradient passes"),
          open_names(d));
    return true;
  }
  if (cuts_the_prompt(d) || !above_agrees(d, mixer->layer) || !readers_agree(d, mixer->layer)) return false;
  if (mixer->down->shape.size() != 2 || !d.deviates(mixer->down->name)) return false;
  const bool latent = rows_agree(d, *mixer->down, {{0, mixer->latent_rows}}) && !d.deviates(mixer->norm->name);
  const bool rotary = rows_agree(d, *mixer->down, {{mixer->latent_rows, mixer->down->shape[0] - mixer->latent_rows}});
  if (latent == rotary) return false;
  d.add(rotary ? "dropped_latent_adjoint" : "dropped_rotary_key_adjoint",
        fmt::format(
            "layer {}: of {} only the rows of the {} deviate: the gradient of that part of the state does not reach the prompt",
            mixer->layer, mixer->down->name, rotary ? "latent" : "rotary key"),
        open_names(d));
  return true;
}

// --- keys or values alone

bool find_attention(Deviations& d) {
  const auto mixer = last_with(d, attention_mixer);
  if (!mixer || cuts_the_prompt(d) || !above_agrees(d, mixer->layer) || !readers_agree(d, mixer->layer)) return false;
  const bool key = d.deviates(mixer->key->name), value = d.deviates(mixer->value->name);
  const auto open = d.open();
  const bool below = std::any_of(open.begin(), open.end(), [](const auto* p) { return !is_state_weight(kind_of(p->name)); });
  if (key == value || !below) return false;
  d.add(key ? "dropped_key_adjoint" : "dropped_value_adjoint",
        fmt::format("layer {}: {} deviates, {} agrees: the gradient of the {} does not reach the prompt", mixer->layer,
                    key ? mixer->key->name : mixer->value->name, key ? mixer->value->name : mixer->key->name,
                    key ? "keys" : "values"),
        open_names(d));
  return true;
}

// --- a prompt computed again with other values

std::optional<std::int64_t> last_state_layer(const Deviations& d) {
  std::optional<std::int64_t> last;
  for (const auto& p : d.input().measure.parameters) {
    const auto layer = layer_of(p.name);
    if (layer && is_state_weight(kind_of(p.name))) last = std::max(last.value_or(*layer), *layer);
  }
  return last;
}

// Length of the gradient of the state's weights against the reference's.
double state_norm_ratio(const Deviations& d, std::int64_t layer) {
  PairStatistics sum;
  for (const auto* p : parameters_of_layer(d.input().measure, layer)) {
    if (is_state_weight(kind_of(p->name)) && d.deviates(p->name)) sum.merge(p->statistics);
  }
  return sum.norm_ratio();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// In the last layer with routed experts that deviate: how much more they do than the shared experts, which every token passes, or
// than the rest of the layer where there are none. None: no experts.
std::optional<double> expert_excess(const Deviations& d) {
  const auto& measure = d.input().measure;
  for (auto layer = measure.by_layer.rbegin(); layer != measure.by_layer.rend(); ++layer) {
    std::vector<double> routed, shared, other;
    for (const auto* p : parameters_of_layer(measure, layer->first)) {
      const std::string kind = kind_of(p->name);
      if (is_indexer(kind) || makes_state(kind) || p->statistics.reference_nonzero == 0) continue;
      const double error = p->statistics.relative_l2();
      if (!is_routed(kind)) {
        (contains(kind, "shared") ? shared : other).push_back(error);
      } else if (d.deviates(p->name)) {
        routed.push_back(error);
      }
    }
    const auto& common = shared.empty() ? other : shared;
    if (routed.empty() || common.empty()) continue;
    const double floor = median(common);
    return floor > 0 ? median(routed) / floor : HUGE_VAL;
  }
  return std::nullopt;
}

bool find_changed_recompute(Deviations& d) {
  const auto checks = d.input().candidate.checks(d.input().measure.step);
  const auto changed = checks.find("changed_choices");
  if (changed != checks.end() && changed->second > 0) {
    d.add("stale_route_at_recompute",
          fmt::format("the run itself counted {} routers and indexers that chose otherwise when a segment was computed again",
                      changed->second),
          open_names(d));
    return true;
  }
  const auto layer = last_state_layer(d);
  if (!layer || cuts_the_prompt(d) || !above_agrees(d, *layer) || !readers_agree(d, *layer)) return false;
  const double ratio = state_norm_ratio(d, *layer);
  const auto excess = expert_excess(d);
  if (!(ratio >= kShortest && ratio <= kLongest) || !excess) return false;
  const bool routes = *excess >= kExpertExcess;
  d.add(routes ? "stale_route_at_recompute" : "changed_recompute",
        fmt::format(
            "what acts after the last state agrees; the weights of that state (layer {}) have a gradient of {:.2f} times the "
            "length: little or nothing is cut, but it was computed from other values. {}",
            *layer, ratio,
            routes ? fmt::format("Routed experts deviate {:.1f} times as much as what every token passes: the prompt was computed "
                                 "again with other routes",
                                 *excess)
                   : "The prompt was computed again with other routes, selected keys or weights"),
        open_names(d));
  return true;
}

}  // namespace

void find_state_adjoints(Deviations& d) {
  if (d.open().empty()) return;
  for (const auto find : {find_recurrent, find_latent, find_attention, find_changed_recompute}) {
    if (find(d)) return;
  }
}

}  // namespace longstraw::compare
