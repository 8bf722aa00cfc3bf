// Causes that show in which layers and kinds deviate: a part of the prompt's gradient is missing.

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "compare/deviations.h"
#include "compare/names.h"

namespace longstraw::compare {
namespace {

constexpr double kMostLayers = 0.8;

// A weight that makes state; the norm before it feeds queries too and tells less.
bool is_state_weight(const std::string& kind) { return makes_state(kind) && kind.find("norm") == std::string::npos; }

struct Pattern {
  std::set<std::int64_t> state_layers;        // layers that have state weights
  std::set<std::int64_t> losing_layers;       // those where a state weight deviates
  double least_loss = 2, most_loss = 0;       // relative L2 of the deviating state weights
  std::vector<std::string> agreeing;          // what acts after the last layer's state and agrees
  bool tail_deviates = false;                 // something there deviates after all
  std::vector<std::string> others_deviating;  // deviating parameters that make no state
};

Pattern pattern_of(const Deviations& d) {
  Pattern p;
  const auto& measure = d.input().measure;
  const std::int64_t last = measure.by_layer.empty() ? -1 : measure.by_layer.rbegin()->first;
  for (const auto& parameter : measure.parameters) {
    const auto layer = layer_of(parameter.name);
    const std::string kind = kind_of(parameter.name);
    const bool deviates = d.deviates(parameter.name);
    if (layer && is_state_weight(kind)) {
      p.state_layers.insert(*layer);
      if (deviates) {
        p.losing_layers.insert(*layer);
        p.least_loss = std::min(p.least_loss, parameter.statistics.relative_l2());
        p.most_loss = std::max(p.most_loss, parameter.statistics.relative_l2());
      }
      continue;
    }
    if (deviates) p.others_deviating.push_back(parameter.name);
    // A tied output matrix carries the prompt's embedding gradient and tells nothing.
    const bool after_all_state = layer ? *layer == last && !makes_state(kind)
                                       : kind.find("norm") != std::string::npos || kind.find("lm_head") != std::string::npos;
    if (!after_all_state) continue;
    if (deviates) {
      p.tail_deviates = true;
    } else {
      p.agreeing.push_back(parameter.name);
    }
  }
  return p;
}

std::vector<std::string> open_names(const Deviations& d) {
  std::vector<std::string> names;
  for (const auto* parameter : d.open()) names.push_back(parameter->name);
  return names;
}

}  // namespace

void find_cut_prompt(Deviations& d) {
  if (d.open().empty()) return;
  const Pattern p = pattern_of(d);
  if (p.tail_deviates || p.agreeing.size() < 2) return;
  const auto wanted = kMostLayers * static_cast<double>(p.state_layers.size());
  if (p.state_layers.empty() || static_cast<double>(p.losing_layers.size()) < wanted) return;
  if (p.others_deviating.empty()) {
    d.add("missing_key_value_gradient",
          fmt::format("only key, value and state weights deviate (relative L2 {:.3f} to {:.3f}, {} of {} layers): a part of their "
                      "own gradient is missing, what lies below gets all of it",
                      p.least_loss, p.most_loss, p.losing_layers.size(), p.state_layers.size()),
          open_names(d));
    return;
  }
  d.add(
      "detached_prompt",
      fmt::format("the gradient through the prompt's state is missing, wholly or in part: key, value and state weights are off by "
                  "{:.0f} to {:.0f} % in {} of {} layers, while what acts after the last layer's state agrees ({})",
                  100 * p.least_loss, 100 * p.most_loss, p.losing_layers.size(), p.state_layers.size(), listed(p.agreeing)),
      open_names(d));
}

}  // namespace longstraw::compare
