#pragma once
// Reading JSONL: one line at a time, errors with their place.

#include <nlohmann/json.hpp>

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace longstraw::core::data {

// A line of a file, for messages: "rollouts.jsonl:12: completion_ids: is empty, wanted at least one token".
struct Place {
  std::string file;
  std::int64_t line = 0;

  [[noreturn]] void fail(std::string_view key, std::string_view problem) const;  // throws FormatError
};

// The lines of a file that are not blank, through a fixed buffer. Throws FormatError for a file that is missing, can't
// be opened, is a folder, or has a line of more than 1 GiB; IoError when reading fails midway.
class LineReader {
 public:
  explicit LineReader(const std::filesystem::path& path);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  // False at the end. `line` keeps its memory between calls.
  bool next(std::string& line);
  const Place& place() const { return place_; }  // of the line read last

 private:
  bool next_any(std::string& line);
  bool fill();

  Place place_;
  int file_ = -1;
  std::vector<char> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

struct ParsedRow {
  nlohmann::json columns;                  // those that were kept
  std::vector<std::string> other_columns;  // names of those that were not
};

// One line as a JSON object. Columns that `keep` refuses are parsed but not stored. FormatError for what is no JSON
// object, for a column that occurs twice, and, by name, for the NaN and Infinity that Python writes and JSON lacks.
ParsedRow parse_row(const std::string& line, const Place& place, const std::function<bool(const std::string&)>& keep);

// A value in a message: its JSON, shortened; "a list of 3" for a list.
std::string describe(const nlohmann::json& value);

}  // namespace longstraw::core::data
