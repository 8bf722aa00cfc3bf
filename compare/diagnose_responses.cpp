// Causes that show in the responses' own numbers: tokens, masks, rewards, advantages and log-probabilities.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "compare/deviations.h"

namespace longstraw::compare {
namespace {

using core::record::ResponseRecord;
using Responses = std::vector<ResponseRecord>;

// How far two evaluations of a log-probability may be apart.
double logprob_tolerance(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64: return 1e-8;
    case Dtype::kFloat32: return 1e-2;
    case Dtype::kBfloat16: return 0.5;
  }
  return 0;
}

bool close(double a, double b, double tolerance) {
  return (std::isnan(a) && std::isnan(b)) || a == b || std::abs(a - b) <= tolerance;
}

bool close(const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!close(a[i], b[i], tolerance)) return false;
  }
  return true;
}

std::string place(const ResponseRecord& r) { return fmt::format("group {} (prompt {}) member {}", r.group, r.prompt_id, r.member); }

std::vector<std::string> open_names(const Deviations& d) {
  std::vector<std::string> names;
  for (const auto* parameter : d.open()) names.push_back(parameter->name);
  return names;
}

// Responses whose `matches(reference, candidate)` fails although those of two members of a group match crosswise.
std::vector<std::string> crossed_members(const Responses& b, const Responses& a,
                                         const std::function<bool(const ResponseRecord&, const ResponseRecord&)>& matches) {
  std::vector<std::string> members;
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (matches(b[i], a[i])) continue;
    for (std::size_t k = 0; k < b.size(); ++k) {
      if (k == i || b[k].group != b[i].group || matches(b[k], a[k]) || !matches(b[k], a[i])) continue;
      members.push_back(fmt::format("member {} of group {} has what belongs to member {}", b[i].member, b[i].group, b[k].member));
      break;
    }
  }
  return members;
}

// Whether every response that differs has another member's values.
bool report_crossed(Deviations& d, const Responses& b, const Responses& a, const char* what,
                    const std::function<bool(const ResponseRecord&, const ResponseRecord&)>& matches) {
  std::size_t different = 0;
  for (std::size_t i = 0; i < b.size(); ++i) different += matches(b[i], a[i]) ? 0 : 1;
  const auto members = crossed_members(b, a, matches);
  if (different == 0 || members.size() != different) return false;
  d.add("swapped_members", fmt::format("{}: {}", what, listed(members)), open_names(d));
  return true;
}

bool same_tokens(const ResponseRecord& b, const ResponseRecord& a) { return a.tokens == b.tokens; }

bool find_in_tokens(Deviations& d, const Responses& b, const Responses& a) {
  if (report_crossed(d, b, a, "tokens", same_tokens)) return true;
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (b[i].prompt_id != a[i].prompt_id || b[i].group != a[i].group || b[i].member != a[i].member) {
      d.add("different_responses", fmt::format("response {}: {} against {}", i, place(a[i]), place(b[i])), open_names(d));
      return true;
    }
    if (!same_tokens(b[i], a[i])) {
      const bool shifted = b[i].tokens.size() == a[i].tokens.size() + 1 &&
                           std::equal(a[i].tokens.begin(), a[i].tokens.end(), b[i].tokens.begin() + 1);
      d.add(shifted ? "missing_boundary_token" : "different_responses",
            fmt::format("{}: {} tokens against {}{}", place(a[i]), a[i].tokens.size(), b[i].tokens.size(),
                        shifted ? ", the first response token is missing" : ""),
            open_names(d));
      return true;
    }
    if (b[i].mask != a[i].mask) {
      const auto at = std::mismatch(b[i].mask.begin(), b[i].mask.end(), a[i].mask.begin()).first - b[i].mask.begin();
      d.add(at == 0 ? "missing_boundary_token" : "different_mask", fmt::format("{}: the masks differ at token {}", place(a[i]), at),
            open_names(d));
      return true;
    }
  }
  return false;
}

bool find_in_scores(Deviations& d, const Responses& b, const Responses& a) {
  double largest = 0;
  for (const auto& response : b) largest = std::max(largest, std::abs(response.advantage));
  // Advantages are computed in float32 or better from few numbers.
  const double tolerance = 1e-4 * largest;
  const auto same_advantage = [&](const auto& x, const auto& y) { return close(x.advantage, y.advantage, tolerance); };
  const auto same_reward = [](const auto& x, const auto& y) {
    return x.reward.has_value() == y.reward.has_value() &&
           close(x.reward.value_or(0), y.reward.value_or(0), 1e-6 * std::abs(x.reward.value_or(0)));
  };
  if (report_crossed(d, b, a, "rewards", same_reward) || report_crossed(d, b, a, "advantages", same_advantage)) return true;
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (same_advantage(b[i], a[i]) && same_reward(b[i], a[i])) continue;
    d.add("different_advantages",
          fmt::format("{}: advantage {} against {}, reward {} against {}", place(a[i]), a[i].advantage, b[i].advantage,
                      a[i].reward.value_or(NAN), b[i].reward.value_or(NAN)),
          open_names(d));
    return true;
  }
  return false;
}

struct LogprobCounts {
  std::size_t tokens = 0, off = 0;            // over all responses
  std::size_t responses = 0, only_first = 0;  // responses of two tokens or more; those in which only the first is off
  std::size_t shifted = 0;                    // those that equal the reference's from its second token on
  double error = 0;                           // mean over the tokens that are off
};

LogprobCounts count_logprobs(const Responses& b, const Responses& a, double tolerance) {
  LogprobCounts c;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const auto &x = *b[i].policy_logprobs, &y = *a[i].policy_logprobs;
    std::size_t off = 0;
    for (std::size_t t = 0; t < x.size(); ++t) {
      if (close(x[t], y[t], tolerance)) continue;
      ++off;
      c.error += std::abs(x[t] - y[t]);
    }
    c.tokens += x.size();
    c.off += off;
    if (x.size() < 2) continue;
    ++c.responses;
    c.only_first += off == 1 && !close(x[0], y[0], tolerance);
    c.shifted += off > 0 && close({x.begin() + 1, x.end()}, {y.begin(), y.end() - 1}, tolerance);
  }
  if (c.off > 0) c.error /= static_cast<double>(c.off);
  return c;
}

bool all_have_logprobs(const Responses& responses) {
  return std::all_of(responses.begin(), responses.end(), [](const auto& r) { return r.policy_logprobs.has_value(); });
}

bool equals_old(const Responses& b, const Responses& a, double tolerance) {
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (!b[i].old_logprobs || !close(*b[i].old_logprobs, *a[i].policy_logprobs, tolerance)) return false;
  }
  return true;
}

bool find_in_logprobs(Deviations& d, const Responses& b, const Responses& a) {
  if (!all_have_logprobs(a) || !all_have_logprobs(b)) return false;
  const double tolerance = logprob_tolerance(d.input().bounds.dtype());
  const auto same = [&](const auto& x, const auto& y) { return close(*x.policy_logprobs, *y.policy_logprobs, tolerance); };
  if (report_crossed(d, b, a, "log-probabilities", same)) return true;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const auto &x = *b[i].policy_logprobs, &y = *a[i].policy_logprobs;
    for (std::size_t t = 0; t < x.size(); ++t) {
      if (std::isfinite(y[t]) || !std::isfinite(x[t])) continue;
      d.add("non_finite", fmt::format("{}: the log-probability of token {} is {}", place(a[i]), t, y[t]), open_names(d));
      return true;
    }
  }
  const LogprobCounts c = count_logprobs(b, a, tolerance);
  if (c.off == 0) return false;
  if (2 * c.shifted > c.responses) {
    d.add(
        "missing_boundary_token",
        fmt::format("the log-probabilities of {} of {} responses are the reference's from its second token on: the first response "
                    "token is left out",
                    c.shifted, c.responses),
        open_names(d));
  } else if (2 * c.only_first > c.responses) {
    d.add("wrong_boundary_token",
          fmt::format(
              "in {} of {} responses only the first token's log-probability differs (by {:.3g}): the one that the last prompt "
              "token predicts",
              c.only_first, c.responses, c.error),
          open_names(d));
  } else if (equals_old(b, a, tolerance)) {
    d.add("stale_weights",
          fmt::format("the log-probabilities of {} of {} tokens differ (by {:.3g}) and equal the old ones, those of the rollout's "
                      "weights",
                      c.off, c.tokens, c.error),
          open_names(d));
  } else if (find_in_trace(d, b, a)) {
  } else if (2 * c.off > c.tokens) {
    d.add(
        "different_forward",
        fmt::format("the log-probabilities of {} of {} tokens differ (by {:.3g}): the forward pass computes something else: other "
                    "weights, a state made by other weights, or another operation, which a trace in both records would name",
                    c.off, c.tokens, c.error),
        open_names(d));
  } else {
    d.add("different_logprobs",
          fmt::format("the log-probabilities of {} of {} tokens differ (by {:.3g})", c.off, c.tokens, c.error), open_names(d));
  }
  return true;
}

}  // namespace

bool find_in_responses(Deviations& d) {
  const auto step = d.input().measure.step;
  const Responses b = d.input().reference.responses(step), a = d.input().candidate.responses(step);
  if (b.empty() || a.empty()) return false;
  if (b.size() != a.size()) {
    d.add("different_responses", fmt::format("{} responses against {}", a.size(), b.size()), open_names(d));
    return true;
  }
  return find_in_tokens(d, b, a) || find_in_scores(d, b, a) || find_in_logprobs(d, b, a);
}

}  // namespace longstraw::compare
