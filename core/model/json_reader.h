#pragma once
// Reads the keys of one JSON object (config.json) with their types and ranges checked. Every refusal is a FormatError
// that names file, key, what it got and what it wanted. Null counts as absent, as Hugging Face treats it.

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::core::model {

class JsonReader {
 public:
  // `file` is how messages call it; `prefix` stands before each key ("rope_parameters."). Keeps a copy of `object`.
  JsonReader(std::string file, nlohmann::json object, std::string prefix = "");

  const std::string& file() const { return file_; }
  const nlohmann::json& json() const { return object_; }
  bool has(std::string_view key) const;         // present and not null
  bool is_present(std::string_view key) const;  // present, null included

  int64_t positive(std::string_view key) const;
  int64_t positive(std::string_view key, int64_t otherwise) const;
  int64_t count(std::string_view key, int64_t otherwise) const;  // 0 or more
  double positive_number(std::string_view key) const;
  double positive_number(std::string_view key, double otherwise) const;
  double number(std::string_view key, double otherwise) const;
  bool flag(std::string_view key, bool otherwise) const;
  std::string text(std::string_view key) const;
  std::string text(std::string_view key, std::string otherwise) const;
  std::vector<double> positive_numbers(std::string_view key) const;
  // Of any sign; infinity too, spelt {"__float__": "Infinity"} as Hugging Face spells what JSON can't.
  std::vector<double> numbers(std::string_view key) const;
  std::vector<std::string> texts(std::string_view key) const;
  std::vector<int64_t> ids(std::string_view key) const;  // an id, a list of ids, or nothing
  JsonReader section(std::string_view key) const;        // of an object inside

  [[noreturn]] void refuse(std::string_view key, std::string_view wanted) const;
  // A feature that changes the computation and is not carried out here.
  [[noreturn]] void unsupported(std::string_view key, std::string_view why) const;

 private:
  const nlohmann::json* find(std::string_view key) const;
  std::string file_;
  nlohmann::json object_;
  std::string prefix_;
};

// The whole file as a reader. The words Infinity, -Infinity and NaN, which Python writes and JSON does not know, are read as
// {"__float__": "Infinity"} and the like. Throws FormatError if it is missing, not JSON, or not an object.
JsonReader read_json(const std::string& file);

// The entry of `known` that is nearest to `name` by edit distance.
std::string nearest(std::string_view name, const std::vector<std::string>& known);

}  // namespace longstraw::core::model
