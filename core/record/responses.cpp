#include "core/record/responses.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/base/errors.h"

namespace longstraw::core::record {
namespace {

constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();  // a reward that nobody gave

using Logprobs = std::optional<std::vector<double>> ResponseRecord::*;
constexpr std::pair<const char*, Logprobs> kLogprobs[] = {{"policy_logprobs", &ResponseRecord::policy_logprobs},
                                                          {"old_logprobs", &ResponseRecord::old_logprobs},
                                                          {"reference_logprobs", &ResponseRecord::reference_logprobs}};

template <class T, class Get>
std::vector<T> column(const std::vector<ResponseRecord>& responses, Get get) {
  std::vector<T> values;
  values.reserve(responses.size());
  for (const auto& response : responses) values.push_back(get(response));
  return values;
}

template <class T, class Get>
std::vector<T> flattened(const std::vector<ResponseRecord>& responses, Get get) {
  std::vector<T> values;
  for (const auto& response : responses) {
    const auto& part = get(response);
    values.insert(values.end(), part.begin(), part.end());
  }
  return values;
}

void write_logprobs(hid_t group, const std::vector<ResponseRecord>& responses, const std::string& where) {
  for (const auto& [name, member] : kLogprobs) {
    std::size_t present = 0;
    for (const auto& response : responses) present += (response.*member).has_value() ? 1 : 0;
    if (present == 0) continue;
    if (present != responses.size()) {
      throw ConfigError(fmt::format("{}/{}: given for {} of {} responses", where, name, present, responses.size()));
    }
    const auto values = flattened<double>(
        responses, [&](const auto& r) -> const auto& { return *(r.*member); });
    hdf5::write_array(group, name, values, where);
  }
}

void write_trace(hid_t group, const std::vector<ResponseRecord>& responses, const std::string& where) {
  const auto& points = responses.front().trace;
  for (const auto& r : responses) {
    const bool same = std::equal(r.trace.begin(), r.trace.end(), points.begin(), points.end(),
                                 [](const auto& x, const auto& y) { return x.first == y.first; });
    if (!same)
      throw ConfigError(fmt::format("{}/trace: group {} member {} has other points than the first", where, r.group, r.member));
  }
  if (points.empty()) return;
  const auto trace = hdf5::create_group(group, "trace", where);
  for (const auto& [name, values] : points) {
    hdf5::write_array(trace.id(), name,
                      flattened<double>(
                          responses, [&](const auto& r) -> const auto& { return r.trace.at(name); }),
                      where + "/trace");
  }
}

// A column of the table must have one entry a response.
template <class T>
void require_length(const std::vector<T>& values, std::size_t wanted, const std::string& where, const char* name) {
  if (values.size() != wanted) {
    throw FormatError(fmt::format("{}/{}: {} entries, expected {}", where, name, values.size(), wanted));
  }
}

std::vector<std::int64_t> read_offsets(hid_t group, const std::string& where) {
  const auto offsets = hdf5::read_ints(group, "offsets", where);
  bool rising = !offsets.empty() && offsets.front() == 0;
  for (std::size_t i = 1; i < offsets.size(); ++i) rising = rising && offsets[i] >= offsets[i - 1];
  if (!rising) throw FormatError(where + "/offsets: expected numbers that start at 0 and do not fall");
  return offsets;
}

}  // namespace

void check_response(const ResponseRecord& r, const std::string& where) {
  const auto check = [&](std::size_t size, const char* name) {
    if (size != r.tokens.size()) {
      throw ConfigError(fmt::format("{}: group {} member {}: {} has {} entries, expected {} (one a token)", where, r.group,
                                    r.member, name, size, r.tokens.size()));
    }
  };
  check(r.mask.size(), "mask");
  for (const auto& [name, member] : kLogprobs) {
    if (r.*member) check((r.*member)->size(), name);
  }
  for (const auto& [name, values] : r.trace) {
    if (name.empty() || name == "." || name.find('/') != std::string::npos) {
      throw ConfigError(fmt::format("{}/trace: '{}' is no name of a point", where, name));
    }
    check(values.size(), ("trace/" + name).c_str());
  }
}

void write_responses(hid_t step_group, const std::vector<ResponseRecord>& responses, const std::string& where) {
  const std::string place = where + "/responses";
  const auto group = hdf5::create_group(step_group, "responses", where);
  const hid_t id = group.id();
  std::vector<std::int64_t> offsets{0};
  for (const auto& response : responses) offsets.push_back(offsets.back() + static_cast<std::int64_t>(response.tokens.size()));
  hdf5::write_array(id, "prompt_id", column<std::string>(responses, [](const auto& r) { return r.prompt_id; }), place);
  hdf5::write_array(id, "group", column<std::int64_t>(responses, [](const auto& r) { return r.group; }), place);
  hdf5::write_array(id, "member", column<std::int64_t>(responses, [](const auto& r) { return r.member; }), place);
  hdf5::write_array(id, "prompt_length", column<std::int64_t>(responses, [](const auto& r) { return r.prompt_length; }), place);
  hdf5::write_array(id, "last_prompt_token", column<std::int64_t>(responses, [](const auto& r) { return r.last_prompt_token; }),
                    place);
  hdf5::write_array(id, "reward", column<double>(responses, [](const auto& r) { return r.reward.value_or(kMissing); }), place);
  hdf5::write_array(id, "advantage", column<double>(responses, [](const auto& r) { return r.advantage; }), place);
  hdf5::write_array(id, "offsets", offsets, place);
  hdf5::write_array(id, "tokens",
                    flattened<std::int64_t>(
                        responses, [](const auto& r) -> const auto& { return r.tokens; }),
                    place);
  hdf5::write_array(id, "mask",
                    flattened<std::uint8_t>(
                        responses, [](const auto& r) -> const auto& { return r.mask; }),
                    place);
  write_logprobs(id, responses, place);
  write_trace(id, responses, place);
}

std::vector<ResponseRecord> read_responses(hid_t step_group, const std::string& where) {
  if (!hdf5::exists(step_group, "responses")) return {};
  const std::string place = where + "/responses";
  const auto group = hdf5::open_group(step_group, "responses", where);
  const hid_t id = group.id();
  const auto offsets = read_offsets(id, place);
  const std::size_t count = offsets.size() - 1;
  const auto total = static_cast<std::size_t>(offsets.back());
  std::vector<ResponseRecord> responses(count);

  const auto each = [&](const auto& values, const char* name, auto assign) {
    require_length(values, count, place, name);
    for (std::size_t i = 0; i < count; ++i) assign(responses[i], values[i]);
  };
  each(hdf5::read_texts(id, "prompt_id", place), "prompt_id", [](auto& r, const auto& v) { r.prompt_id = v; });
  each(hdf5::read_ints(id, "group", place), "group", [](auto& r, auto v) { r.group = v; });
  each(hdf5::read_ints(id, "member", place), "member", [](auto& r, auto v) { r.member = v; });
  each(hdf5::read_ints(id, "prompt_length", place), "prompt_length", [](auto& r, auto v) { r.prompt_length = v; });
  if (hdf5::exists(id, "last_prompt_token")) {
    each(hdf5::read_ints(id, "last_prompt_token", place), "last_prompt_token", [](auto& r, auto v) { r.last_prompt_token = v; });
  }
  each(hdf5::read_doubles(id, "reward", place), "reward", [](auto& r, double v) {
    if (!std::isnan(v)) r.reward = v;
  });
  each(hdf5::read_doubles(id, "advantage", place), "advantage", [](auto& r, double v) { r.advantage = v; });

  const auto flat = [&](const auto& values, const char* name, auto assign) {
    require_length(values, total, place, name);
    for (std::size_t i = 0; i < count; ++i) assign(responses[i], values.begin() + offsets[i], values.begin() + offsets[i + 1]);
  };
  flat(hdf5::read_ints(id, "tokens", place), "tokens", [](auto& r, auto from, auto to) { r.tokens.assign(from, to); });
  flat(hdf5::read_ints(id, "mask", place), "mask", [](auto& r, auto from, auto to) { r.mask.assign(from, to); });
  for (const auto& [name, member] : kLogprobs) {
    if (!hdf5::exists(id, name)) continue;
    flat(hdf5::read_doubles(id, name, place), name, [&, m = member](auto& r, auto from, auto to) { (r.*m).emplace(from, to); });
  }
  if (!hdf5::exists(id, "trace")) return responses;
  const auto trace = hdf5::open_group(id, "trace", place);
  for (const auto& name : hdf5::link_names(trace.id(), place + "/trace")) {
    flat(hdf5::read_doubles(trace.id(), name, place + "/trace"), ("trace/" + name).c_str(),
         [&](auto& r, auto from, auto to) { r.trace[name].assign(from, to); });
  }
  return responses;
}

}  // namespace longstraw::core::record
