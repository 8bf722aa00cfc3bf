#include "app/inspect_text.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <vector>

namespace longstraw::app {
namespace {

using Json = nlohmann::ordered_json;

bool is_table(const Json& value) {
  const auto flat = [](const Json& row) {
    return row.is_object() && std::none_of(row.begin(), row.end(), [](const Json& cell) { return cell.is_object(); });
  };
  return value.is_array() && !value.empty() && std::all_of(value.begin(), value.end(), flat);
}

std::string scalar(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return fmt::format("{:.6g}", value.get<double>());
  if (value.is_array() && std::none_of(value.begin(), value.end(), [](const Json& v) { return v.is_structured(); })) {
    std::string text = "[";
    for (const auto& item : value) text += (text.size() > 1 ? ", " : "") + scalar(item);
    return text + "]";
  }
  return value.dump();
}

// 28311552 (27.0 MiB), 137592897536 (128.14 GiB)
std::string with_unit(const std::string& key, const Json& value) {
  std::string text = scalar(value);
  const bool is_bytes = key.find("bytes") != std::string::npos;
  if (!is_bytes || !value.is_number_integer()) return text;
  constexpr double kMebibyte = 1 << 20, kGibibyte = 1 << 30, kTebibyte = 1024 * kGibibyte;
  const auto bytes = value.get<double>();
  if (bytes >= kTebibyte) text += fmt::format(" ({:.2f} TiB)", bytes / kTebibyte);
  else if (bytes >= kGibibyte) text += fmt::format(" ({:.2f} GiB)", bytes / kGibibyte);
  else if (bytes >= kMebibyte) text += fmt::format(" ({:.1f} MiB)", bytes / kMebibyte);
  return text;
}

std::vector<std::string> columns_of(const Json& table) {
  std::vector<std::string> columns;
  for (const auto& row : table) {
    for (const auto& [key, cell] : row.items()) {
      if (std::find(columns.begin(), columns.end(), key) == columns.end()) columns.push_back(key);
    }
  }
  return columns;
}

void write_table(const Json& table, const std::string& indent, std::string& out) {
  const std::vector<std::string> columns = columns_of(table);
  std::vector<std::vector<std::string>> lines{columns};
  for (const auto& row : table) {
    lines.emplace_back();
    for (const auto& column : columns) lines.back().push_back(row.contains(column) ? with_unit(column, row[column]) : "-");
  }
  std::vector<size_t> widths(columns.size(), 0);
  for (const auto& line : lines) {
    for (size_t c = 0; c < line.size(); ++c) widths[c] = std::max(widths[c], line[c].size());
  }
  for (const auto& line : lines) {
    std::string text = indent;
    for (size_t c = 0; c < line.size(); ++c) text += c + 1 < line.size() ? fmt::format("{:{}}  ", line[c], widths[c]) : line[c];
    out += text + "\n";
  }
}

void write(const Json& value, const std::string& indent, std::string& out);

void write_entry(const std::string& key, const Json& value, const std::string& indent, std::string& out) {
  if (is_table(value)) {
    out += fmt::format("{}{}:\n", indent, key);
    write_table(value, indent + "  ", out);
  } else if (value.is_object() && !value.empty()) {
    out += fmt::format("{}{}:\n", indent, key);
    write(value, indent + "  ", out);
  } else if (value.is_array() && std::any_of(value.begin(), value.end(), [](const Json& v) { return v.is_structured(); })) {
    for (size_t i = 0; i < value.size(); ++i) write_entry(fmt::format("{}[{}]", key, i), value[i], indent, out);
  } else if (value.is_string() && value.get_ref<const std::string&>().find('\n') != std::string::npos) {
    out += fmt::format("{}{}:\n", indent, key);
    const auto& text = value.get_ref<const std::string&>();
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      out += indent + "  " + text.substr(begin, end - begin) + "\n";
      begin = end + 1;
    }
  } else {
    out += fmt::format("{}{}: {}\n", indent, key, with_unit(key, value));
  }
}

void write(const Json& value, const std::string& indent, std::string& out) {
  for (const auto& [key, entry] : value.items()) write_entry(key, entry, indent, out);
}

}  // namespace

std::string readable_text(const Json& value) {
  std::string out;
  write(value, "", out);
  return out;
}

}  // namespace longstraw::app
