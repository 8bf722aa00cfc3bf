#include "core/data/json_lines.h"

#include "core/base/errors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

namespace longstraw::core::data {

using nlohmann::json;

void Place::fail(std::string_view key, std::string_view problem) const {
  const std::string where = line > 0 ? fmt::format("{}:{}", file, line) : file;
  throw FormatError(key.empty() ? fmt::format("{}: {}", where, problem) : fmt::format("{}: {}: {}", where, key, problem));
}

LineReader::LineReader(const std::filesystem::path& path) : place_{path.string(), 0}, buffer_(1 << 20) {
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) place_.fail("", fmt::format("can't be read: {}", std::strerror(errno)));
  struct stat status {};
  if (::fstat(file_, &status) == 0 && S_ISDIR(status.st_mode)) {
    ::close(file_);
    place_.fail("", "is a folder, wanted a JSONL file");
  }
}

LineReader::~LineReader() { ::close(file_); }

bool LineReader::fill() {
  ssize_t count = 0;
  do {
    count = ::read(file_, buffer_.data(), buffer_.size());
  } while (count < 0 && errno == EINTR);
  if (count < 0) throw IoError(fmt::format("{}: reading failed: {}", place_.file, std::strerror(errno)));
  begin_ = 0;
  end_ = static_cast<std::size_t>(count);
  return count > 0;
}

bool LineReader::next_any(std::string& line) {
  constexpr std::size_t kLongest = std::size_t{1} << 30;
  line.clear();
  ++place_.line;
  bool any = false;
  while (begin_ < end_ || fill()) {
    any = true;
    const char* from = buffer_.data() + begin_;
    const void* newline = std::memchr(from, '\n', end_ - begin_);
    const std::size_t count = newline ? static_cast<std::size_t>(static_cast<const char*>(newline) - from) : end_ - begin_;
    line.append(from, count);
    begin_ += count + (newline ? 1 : 0);
    if (line.size() > kLongest) place_.fail("", "the line is longer than 1 GiB");
    if (newline) return true;
  }
  return any;
}

bool LineReader::next(std::string& line) {
  const auto is_blank = [](unsigned char c) { return c == ' ' || c == '\t' || c == '\r'; };
  while (next_any(line)) {
    if (!std::all_of(line.begin(), line.end(), is_blank)) return true;
  }
  return false;
}

namespace {

// The number that Python's json writes and JSON does not have, if it is what stopped the parser at `byte`.
std::string_view non_number_at(std::string_view line, std::size_t byte) {
  for (const std::string_view word : {"NaN", "-Infinity", "Infinity", "nan", "-inf", "inf"}) {
    // The parser reports the byte where it gave up, somewhere within the word or one past it.
    const std::size_t from = byte > word.size() + 1 ? byte - word.size() - 1 : 0;
    const std::size_t at = line.find(word, from);
    if (at != std::string_view::npos && at <= byte) return word;
  }
  return {};
}

}  // namespace

ParsedRow parse_row(const std::string& line, const Place& place, const std::function<bool(const std::string&)>& keep) {
  ParsedRow row;
  std::set<std::string> seen;
  std::string column;
  const auto on_event = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event != json::parse_event_t::key || depth != 1) return true;
    column = parsed.get<std::string>();
    if (!seen.insert(column).second) place.fail(column, "the column occurs twice");
    const bool kept = keep(column);
    if (!kept) row.other_columns.push_back(column);
    return kept;
  };
  try {
    row.columns = json::parse(line, on_event);
  } catch (const json::parse_error& error) {
    if (const auto word = non_number_at(line, error.byte); !word.empty()) {
      place.fail(column, fmt::format("got {}, which is not JSON; wanted a finite number, or null where there is none", word));
    }
    if (error.byte > line.size()) place.fail(column, "the line ends within its JSON: is the file cut off?");
    place.fail(column, fmt::format("not JSON at byte {} of the line: {}", error.byte, describe(line.substr(error.byte - 1, 20))));
  } catch (const json::out_of_range& error) {
    place.fail(column, fmt::format("a number is too large for a double: {}", error.what()));
  }
  if (!row.columns.is_object()) place.fail("", fmt::format("got {}, wanted a JSON object", describe(row.columns)));
  return row;
}

std::string describe(const json& value) {
  constexpr std::size_t kLongest = 60;
  if (value.is_array()) return fmt::format("a list of {}", value.size());
  if (value.is_object()) return "an object";
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

}  // namespace longstraw::core::data
