#include "app/study_grid.h"

#include "core/base/errors.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

namespace longstraw::app {
namespace {

// Metrics over all parameters, and writing the cell: as tokens that pass through all of them once.
constexpr double kMeasuring = 32;

std::vector<int64_t> list_of(const char* option, std::vector<int64_t> values, int64_t least) {
  if (values.empty()) throw ConfigError(fmt::format("{}: is empty, wanted at least one number", option));
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  if (values.front() < least) throw ConfigError(fmt::format("{}: got {}, wanted at least {}", option, values.front(), least));
  return values;
}

int64_t parse_tail(const std::string& text) {
  if (text == "all") return INT64_MAX;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    throw ConfigError(fmt::format("--tails: got {}, wanted numbers of tokens from 0, or all", text));
  }
  return value;
}

std::vector<int64_t> tails_of(const std::vector<int64_t>& wanted, int64_t prompt_tokens) {
  std::vector<int64_t> tails;
  for (const int64_t tail : wanted) tails.push_back(tail >= prompt_tokens - 1 ? prompt_tokens : tail);
  tails.erase(std::unique(tails.begin(), tails.end()), tails.end());
  return tails;
}

}  // namespace

std::vector<StudyPoint> points_of(const StudyGrid& grid, int64_t smallest_group) {
  std::vector<int64_t> tails;
  for (const auto& text : grid.tails) tails.push_back(parse_tail(text));
  tails = list_of("--tails", std::move(tails), 0);
  const auto group_sizes = list_of("--group-sizes", grid.group_sizes, smallest_group);
  const auto response_tokens = list_of("--response-tokens", grid.response_tokens, 1);
  const auto seeds = list_of("--seeds", grid.seeds, 0);
  std::vector<StudyPoint> points;
  for (const int64_t prompt : list_of("--prompt-tokens", grid.prompt_tokens, 2)) {
    for (const int64_t group : group_sizes) {
      for (const int64_t response : response_tokens) {
        for (const int64_t seed : seeds) points.push_back({prompt, group, response, seed, tails_of(tails, prompt)});
      }
    }
  }
  return points;
}

std::string arm_of(int64_t tail_tokens, int64_t prompt_tokens) {
  if (tail_tokens == 0) return "detached";
  return tail_tokens == prompt_tokens ? "exact" : "tail";
}

double sampling_work(const StudyPoint& p) { return double(p.prompt_tokens + p.group_size * p.response_tokens); }

double sweep_work(const StudyPoint& p, int64_t tail_tokens) {
  return double(p.prompt_tokens + 3 * tail_tokens + 3 * p.group_size * p.response_tokens) + kMeasuring;
}

double reference_work(const StudyPoint& p) {
  return 3.0 * double(p.group_size * (p.prompt_tokens + p.response_tokens)) + kMeasuring;
}

std::string TimeLeft::text() const {
  if (done_ <= 0) return "time left unknown";
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - started_;
  return fmt::format("about {} left", duration_text(passed.count() * std::max(0.0, total_ - done_) / done_));
}

std::string duration_text(double seconds) {
  const auto whole = int64_t(std::llround(std::max(0.0, seconds)));
  if (whole < 90) return fmt::format("{} s", whole);
  const int64_t minutes = (whole + 30) / 60;
  return minutes < 90 ? fmt::format("{} min", minutes) : fmt::format("{} h {:02} min", minutes / 60, minutes % 60);
}

}  // namespace longstraw::app
