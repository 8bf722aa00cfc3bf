#include "core/base/atomic_file.h"
#include "core/base/errors.h"
#include "core/base/sha256.h"
#include "core/data/rollouts.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <span>

namespace longstraw::core::data {
namespace {

// JSON texts of single values. Doubles are written with the fewest digits that read back as the same double.
std::string text_of(std::int64_t id) { return std::to_string(id); }
std::string text_of(std::uint8_t mask) { return mask ? "1" : "0"; }
std::string text_of(double number) {
  if (!std::isfinite(number)) throw FormatError(fmt::format("got {}, wanted a finite number", number));
  return fmt::format("{}", number);
}
std::string text_of(const std::optional<double>& number) { return number ? text_of(*number) : "null"; }
template <class T>
std::string text_of(const std::vector<T>& values) {
  std::string out = "[";
  for (const T& value : values) {
    if (out.size() > 1) out += ',';
    out += text_of(value);
  }
  return out += ']';
}
template <class T>
std::string text_of(const std::optional<std::vector<T>>& values) {
  return values ? text_of(*values) : "null";
}

// Writes lines of one layout: a line holds one response, or, where `grouped`, the list of a group's.
class LineWriter {
 public:
  LineWriter(const PromptGroup& group, std::span<const Response> responses, bool grouped)
      : group_(group), responses_(responses), grouped_(grouped) {}

  std::string line() {
    out_ = "{\"prompt_id\":" + nlohmann::json(group_.prompt_id).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    out_.append(",\"prompt_ids\":").append(text_of(group_.prompt_ids));
    column("completion_ids", &Response::completion_ids, [](const Response&) { return true; });
    optional_column("reward", &Response::reward);
    column("reward_parts", &Response::reward_parts, [](const Response& response) { return !response.reward_parts.empty(); });
    optional_column("advantage", &Response::advantage);
    optional_column("old_logprobs", &Response::old_logprobs);
    optional_column("ref_logprobs", &Response::ref_logprobs);
    optional_column("sampling_logprobs", &Response::sampling_logprobs);
    optional_column("completion_mask", &Response::completion_mask);
    return out_ + "}\n";
  }

 private:
  template <class Member>
  void optional_column(const char* name, Member member) {
    column(name, member, [member](const Response& response) { return (response.*member).has_value(); });
  }

  template <class Member, class Has>
  void column(const char* name, Member member, Has has) {
    if (std::none_of(responses_.begin(), responses_.end(), has)) return;
    out_.append(",\"").append(name).append("\":").append(grouped_ ? "[" : "");
    try {
      for (const Response& response : responses_) {
        if (&response != &responses_.front()) out_ += ',';
        out_ += text_of(response.*member);
      }
    } catch (const FormatError& error) {
      throw FormatError(fmt::format("{} of a response to prompt_id {}: {}", name, group_.prompt_id, error.what()));
    }
    if (grouped_) out_ += ']';
  }

  const PromptGroup& group_;
  std::span<const Response> responses_;
  bool grouped_;
  std::string out_;
};

// Fixed-width little-endian numbers, every list preceded by its length: no two batches have the same bytes.
class Canonical {
 public:
  void add(std::uint64_t value) {
    char bytes[8];
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
    sha_.update(bytes, sizeof bytes);
  }
  void add(std::int64_t value) { add(static_cast<std::uint64_t>(value)); }
  void add(std::uint8_t mask) { add(static_cast<std::uint64_t>(mask != 0)); }
  void add(double value) { add(std::bit_cast<std::uint64_t>(value + 0.0)); }  // -0 and 0 are one number
  void add(const std::string& text) {
    add(static_cast<std::uint64_t>(text.size()));
    sha_.update(text);
  }
  template <class T>
  void add(const std::vector<T>& values) {
    add(static_cast<std::uint64_t>(values.size()));
    for (const T& value : values) add(value);
  }
  template <class T>
  void add(const std::optional<T>& value) {
    add(static_cast<std::uint64_t>(value.has_value()));
    if (value) add(*value);
  }
  void add(const Response& response) {
    add(response.completion_ids);
    add(response.reward);
    add(response.advantage);
    add(response.old_logprobs);
    add(response.ref_logprobs);
    add(response.sampling_logprobs);
    add(response.completion_mask);
    if (!response.reward_parts.empty()) {  // batches without them keep the hash that they have always had
      add(UINT64_MAX);                     // no list has this length: what follows can't be taken for another response
      add(response.reward_parts);
    }
  }
  std::string hex() { return sha_.hex(); }

 private:
  Sha256 sha_;
};

}  // namespace

void write_rollouts(const std::filesystem::path& path, const Batch& batch, RolloutLayout layout) {
  AtomicFile file(path);
  for (const PromptGroup& group : batch) {
    const std::span<const Response> all(group.responses);
    if (layout == RolloutLayout::kGroups) {
      file.write(LineWriter(group, all, true).line());
      continue;
    }
    for (std::size_t i = 0; i < all.size(); ++i) file.write(LineWriter(group, all.subspan(i, 1), false).line());
  }
  file.commit();
}

std::string data_sha256(const Batch& batch) {
  Canonical canonical;
  canonical.add(std::string("longstraw rollouts 1"));
  canonical.add(static_cast<std::uint64_t>(batch.size()));
  for (const PromptGroup& group : batch) {
    canonical.add(group.prompt_id);
    canonical.add(group.prompt_ids);
    canonical.add(group.responses);
  }
  return canonical.hex();
}

}  // namespace longstraw::core::data
