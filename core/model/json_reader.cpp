#include "core/model/json_reader.h"

#include "core/base/errors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <limits>
#include <numeric>
#include <sstream>

namespace longstraw::core::model {

namespace {
bool is_positive_integer(const nlohmann::json& value) {
  return value.is_number_integer() && (value.is_number_unsigned() ? value.get<uint64_t>() <= INT64_MAX : true) &&
         value.get<int64_t>() > 0;
}
bool is_positive_number(const nlohmann::json& value) {
  return value.is_number() && std::isfinite(value.get<double>()) && value.get<double>() > 0;
}

// A number or a spelt-out infinity.
std::optional<double> extended_number(const nlohmann::json& value) {
  if (value.is_number() && std::isfinite(value.get<double>())) return value.get<double>();
  if (!value.is_object() || value.size() != 1) return std::nullopt;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (value.value("__float__", nlohmann::json()) == "Infinity") return kInfinity;
  if (value.value("__float__", nlohmann::json()) == "-Infinity") return -kInfinity;
  return std::nullopt;
}

// Outside of strings, the three words that Python's json writes for numbers that JSON does not know.
std::string with_spelt_out_floats(const std::string& text) {
  std::string out;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (in_string) {
      in_string = text[i] != '"';
      if (text[i] == '\\' && i + 1 < text.size()) out += text[i++];
    } else {
      in_string = text[i] == '"';
      const std::string_view rest = std::string_view(text).substr(i);
      constexpr std::array<std::string_view, 3> kWords{"-Infinity", "Infinity", "NaN"};
      const auto word = std::find_if(kWords.begin(), kWords.end(), [&](std::string_view w) { return rest.starts_with(w); });
      if (word != kWords.end()) {
        out += fmt::format(R"({{"__float__": "{}"}})", *word);
        i += word->size() - 1;
        continue;
      }
    }
    out += text[i];
  }
  return out;
}
}  // namespace

JsonReader::JsonReader(std::string file, nlohmann::json object, std::string prefix)
    : file_(std::move(file)), object_(std::move(object)), prefix_(std::move(prefix)) {
  if (!object_.is_object()) throw FormatError(fmt::format("{}: {}not a JSON object", file_, prefix_));
}

const nlohmann::json* JsonReader::find(std::string_view key) const {
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool JsonReader::has(std::string_view key) const { return find(key) != nullptr; }
bool JsonReader::is_present(std::string_view key) const { return object_.contains(key); }

int64_t JsonReader::positive(std::string_view key) const {
  const auto* value = find(key);
  if (!value || !is_positive_integer(*value)) refuse(key, "a whole number > 0");
  return value->get<int64_t>();
}
int64_t JsonReader::positive(std::string_view key, int64_t otherwise) const { return has(key) ? positive(key) : otherwise; }

int64_t JsonReader::count(std::string_view key, int64_t otherwise) const {
  const auto* value = find(key);
  if (!value) return otherwise;
  const bool is_zero = value->is_number_integer() && *value == 0;
  if (!is_zero && !is_positive_integer(*value)) refuse(key, "a whole number >= 0");
  return value->get<int64_t>();
}

double JsonReader::positive_number(std::string_view key) const {
  const auto* value = find(key);
  if (!value || !is_positive_number(*value)) refuse(key, "a number > 0");
  return value->get<double>();
}
double JsonReader::positive_number(std::string_view key, double otherwise) const {
  return has(key) ? positive_number(key) : otherwise;
}

double JsonReader::number(std::string_view key, double otherwise) const {
  const auto* value = find(key);
  if (!value) return otherwise;
  if (!value->is_number() || !std::isfinite(value->get<double>())) refuse(key, "a number");
  return value->get<double>();
}

bool JsonReader::flag(std::string_view key, bool otherwise) const {
  const auto* value = find(key);
  if (!value) return otherwise;
  if (!value->is_boolean()) refuse(key, "true or false");
  return value->get<bool>();
}

std::string JsonReader::text(std::string_view key) const {
  const auto* value = find(key);
  if (!value || !value->is_string()) refuse(key, "a text");
  return value->get<std::string>();
}
std::string JsonReader::text(std::string_view key, std::string otherwise) const { return has(key) ? text(key) : otherwise; }

std::vector<double> JsonReader::positive_numbers(std::string_view key) const {
  const auto* value = find(key);
  if (!value || !value->is_array() || !std::all_of(value->begin(), value->end(), is_positive_number)) {
    refuse(key, "a list of numbers > 0");
  }
  return value->get<std::vector<double>>();
}

std::vector<double> JsonReader::numbers(std::string_view key) const {
  const auto* value = find(key);
  if (!value || !value->is_array()) refuse(key, "a list of numbers");
  std::vector<double> numbers;
  for (const auto& entry : *value) {
    const auto number = extended_number(entry);
    if (!number) refuse(key, "a list of numbers");
    numbers.push_back(*number);
  }
  return numbers;
}

std::vector<std::string> JsonReader::texts(std::string_view key) const {
  const auto* value = find(key);
  if (!value || !value->is_array() || !std::all_of(value->begin(), value->end(), [](const auto& v) { return v.is_string(); })) {
    refuse(key, "a list of texts");
  }
  return value->get<std::vector<std::string>>();
}

std::vector<int64_t> JsonReader::ids(std::string_view key) const {
  const auto* value = find(key);
  if (!value) return {};
  const auto is_id = [](const nlohmann::json& v) {
    return v.is_number_integer() && (v.is_number_unsigned() ? v.get<uint64_t>() <= INT64_MAX : v.get<int64_t>() >= 0);
  };
  if (is_id(*value)) return {value->get<int64_t>()};
  if (!value->is_array() || !std::all_of(value->begin(), value->end(), is_id)) refuse(key, "a token id or a list of them");
  return value->get<std::vector<int64_t>>();
}

JsonReader JsonReader::section(std::string_view key) const {
  const auto* value = find(key);
  if (!value || !value->is_object()) refuse(key, "an object");
  return JsonReader(file_, *value, fmt::format("{}{}.", prefix_, key));
}

void JsonReader::refuse(std::string_view key, std::string_view wanted) const {
  const auto found = object_.find(key);
  const std::string got = found == object_.end() ? "nothing" : found->dump();
  throw FormatError(fmt::format("{}: {}{}: got {}, wanted {}", file_, prefix_, key, got, wanted));
}

void JsonReader::unsupported(std::string_view key, std::string_view why) const {
  throw FormatError(fmt::format("{}: {}{}: {}: {}", file_, prefix_, key, object_.at(std::string(key)).dump(), why));
}

JsonReader read_json(const std::string& file) {
  std::ifstream stream(file);
  if (!stream) throw FormatError(fmt::format("{}: can't be opened", file));
  try {
    std::stringstream text;
    text << stream.rdbuf();
    return JsonReader(file, nlohmann::json::parse(with_spelt_out_floats(text.str())));
  } catch (const nlohmann::json::exception& error) {
    throw FormatError(fmt::format("{}: not JSON: {}", file, error.what()));
  }
}

std::string nearest(std::string_view name, const std::vector<std::string>& known) {
  const auto distance = [&](const std::string& other) {
    std::vector<size_t> row(other.size() + 1);
    std::iota(row.begin(), row.end(), 0);
    for (size_t i = 0; i < name.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i + 1;
      for (size_t j = 0; j < other.size(); ++j) {
        const size_t substituted = diagonal + (name[i] != other[j]);
        diagonal = row[j + 1];
        row[j + 1] = std::min({substituted, row[j] + 1, row[j + 1] + 1});
      }
    }
    return row.back();
  };
  return *std::min_element(known.begin(), known.end(),
                           [&](const std::string& a, const std::string& b) { return distance(a) < distance(b); });
}

}  // namespace longstraw::core::model
