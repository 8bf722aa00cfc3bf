#include "compare/names.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace longstraw::compare {
namespace {

constexpr std::string_view kLayers = "layers.";
constexpr std::string_view kExperts = "experts.";

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Position of the number after `word` where the word is a whole component of the name; npos without one.
std::size_t number_after(const std::string& name, std::string_view word) {
  for (std::size_t at = name.find(word); at != std::string::npos; at = name.find(word, at + 1)) {
    const std::size_t number = at + word.size();
    const bool whole = at == 0 || name[at - 1] == '.';
    if (whole && number < name.size() && is_digit(name[number])) return number;
  }
  return std::string::npos;
}

std::size_t end_of_number(const std::string& name, std::size_t begin) {
  while (begin < name.size() && is_digit(name[begin])) ++begin;
  return begin;
}

}  // namespace

std::optional<std::int64_t> layer_of(const std::string& name) {
  const std::size_t begin = number_after(name, kLayers);
  if (begin == std::string::npos) return std::nullopt;
  const std::size_t end = end_of_number(name, begin);
  // More digits than any model has layers: not a number we could hold.
  if (end - begin > 9 || end == name.size() || name[end] != '.') return std::nullopt;
  return std::stoll(name.substr(begin, end - begin));
}

std::string kind_of(const std::string& name) {
  std::string kind = name;
  if (layer_of(name)) kind = name.substr(end_of_number(name, number_after(name, kLayers)) + 1);
  const std::size_t expert = number_after(kind, kExperts);
  if (expert != std::string::npos) {
    const std::size_t end = end_of_number(kind, expert);
    if (end < kind.size() && kind[end] == '.') kind.erase(expert, end + 1 - expert);
  }
  return kind;
}

std::optional<std::int64_t> expert_of(const std::string& name) {
  const std::size_t begin = number_after(name, kExperts);
  if (begin == std::string::npos) return std::nullopt;
  const std::size_t end = end_of_number(name, begin);
  if (end - begin > 9 || end == name.size() || name[end] != '.') return std::nullopt;
  return std::stoll(name.substr(begin, end - begin));
}

bool is_indexer(const std::string& kind) { return kind.find("indexer.") != std::string::npos; }

bool is_routed(const std::string& kind) {
  if (kind.find("shared") != std::string::npos) return false;
  // granitemoehybrid: block_sparse_moe.{router.layer,input_linear,output_linear}.
  static constexpr std::array<std::string_view, 4> kParts{"experts.", "mlp.gate.", "mixer.gate.", "block_sparse_moe."};
  return std::any_of(kParts.begin(), kParts.end(), [&](auto part) { return kind.find(part) != std::string::npos; });
}

bool makes_state(const std::string& kind) {
  static constexpr std::array<std::string_view, 14> kParts{"k_proj",  "v_proj",          "k_norm",  "qkv",    "kv_a",
                                                           "kv_b",    "input_layernorm", "in_proj", "conv1d", "A_log",
                                                           "dt_bias", "x_proj",          "dt_proj", "c_attn"};
  static constexpr std::string_view kNot = "in_proj_z";  // the gate of the output, separate in some families
  if (is_indexer(kind)) return false;
  if (kind == "norm.weight") return true;  // the norm before a Mamba-2 mixer
  if (kind.find(kNot) != std::string::npos) return false;
  return std::any_of(kParts.begin(), kParts.end(), [&](auto part) { return kind.find(part) != std::string::npos; });
}

}  // namespace longstraw::compare
