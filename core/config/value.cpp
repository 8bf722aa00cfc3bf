#include "core/config/value.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <sstream>

namespace longstraw::core::config {
namespace {

struct Refused {
  std::string what;
  int line;
};

// Builds the tree from the parser's events: unlike YAML::Node they tell a quoted text from a plain one, keep keys that
// occur twice, and let aliases be refused before anything follows them.
class TreeBuilder : public YAML::EventHandler {
 public:
  Value take_root() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { add(leaf(Value::Kind::kNull, mark, anchor)); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw Refused{"aliases (*name) are not supported", mark.line + 1};
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, const std::string& text) override {
    Value value = leaf(Value::Kind::kScalar, mark, anchor);
    value.text = text;
    value.quoted = tag == "!" || tag == "tag:yaml.org,2002:str";
    add(std::move(value));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor, YAML::EmitterStyle::value) override {
    open_.push_back(leaf(Value::Kind::kList, mark, anchor));
  }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor, YAML::EmitterStyle::value) override {
    open_.push_back(leaf(Value::Kind::kMap, mark, anchor));
  }
  void OnSequenceEnd() override { close(); }
  void OnMapEnd() override { close(); }

 private:
  static Value leaf(Value::Kind kind, const YAML::Mark& mark, YAML::anchor_t anchor) {
    if (anchor != 0) throw Refused{"anchors (&name) are not supported", mark.line + 1};
    Value value;
    value.kind = kind;
    value.line = mark.line + 1;
    return value;
  }
  void close() {
    Value done = std::move(open_.back());
    open_.pop_back();
    add(std::move(done));
  }
  void add(Value value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return;
    }
    Value& parent = open_.back();
    const bool is_key = parent.kind == Value::Kind::kMap && parent.keys.size() == parent.items.size();
    (is_key ? parent.keys : parent.items).push_back(std::move(value));
  }

  Value root_;
  std::vector<Value> open_;
};

template <class Number>
std::optional<Number> parse_number(std::string_view text) {
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return number;
}

bool reads_as_itself(std::string_view text) {
  static constexpr std::array kWords = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "inf", "nan"};
  if (text.empty() || parse_number<double>(text)) return false;
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  if (std::find(kWords.begin(), kWords.end(), lower) != kWords.end()) return false;
  const auto is_word = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '/'; };
  const auto is_plain = [&](unsigned char c) { return is_word(c) || c == '.' || c == '-' || c == '+'; };
  // Colons only after a letter at the start: 1:30 is a number in base 60 to YAML 1.1.
  const bool starts_with_letter = std::isalpha(static_cast<unsigned char>(text[0])) != 0;
  return (is_word(text[0]) || text.starts_with("./") || text.starts_with("..")) && text.back() != ':' &&
         std::all_of(text.begin(), text.end(), [&](unsigned char c) { return is_plain(c) || (c == ':' && starts_with_letter); });
}

}  // namespace

ParsedYaml parse_yaml(const std::string& text) {
  TreeBuilder builder;
  try {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    if (!parser.HandleNextDocument(builder)) return {};
    TreeBuilder second;
    if (parser.HandleNextDocument(second)) {
      return {{}, "more than one YAML document", std::max(1, second.take_root().line)};
    }
  } catch (const Refused& refused) {
    return {{}, refused.what, refused.line};
  } catch (const YAML::Exception& error) {
    return {{}, "not YAML: " + error.msg, error.mark.line + 1};
  }
  return {builder.take_root(), std::nullopt, 0};
}

std::string describe(const Value& value) {
  constexpr std::size_t kLongest = 60;
  switch (value.kind) {
    case Value::Kind::kNull: return "null";
    case Value::Kind::kList: return "a list";
    case Value::Kind::kMap: return "a mapping";
    case Value::Kind::kScalar: break;
  }
  std::string text = value.text.size() > kLongest ? value.text.substr(0, kLongest) + "..." : value.text;
  // A message is one line, whatever the file holds.
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  return value.quoted ? "\"" + text + "\"" : text;
}

std::optional<std::int64_t> parse_int(std::string_view text) { return parse_number<std::int64_t>(text); }
std::optional<std::uint64_t> parse_uint(std::string_view text) { return parse_number<std::uint64_t>(text); }

std::optional<double> parse_double(std::string_view text) {
  const auto number = parse_number<double>(text);
  return number && std::isfinite(*number) ? number : std::nullopt;
}

std::optional<bool> parse_bool(std::string_view text) {
  if (text == "true" || text == "True" || text == "TRUE") return true;
  if (text == "false" || text == "False" || text == "FALSE") return false;
  return std::nullopt;
}

std::string write_text(std::string_view text) {
  if (reads_as_itself(text)) return std::string(text);
  std::string out = "\"";
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c < 0x20 || c == 0x7f) {
      out += fmt::format("\\x{:02x}", c);
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

std::string write_double(double value) {
  std::array<char, 32> buffer{};
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  std::string text(buffer.data(), end);
  // YAML 1.1 takes 1e-06 for a text: the mantissa needs its point.
  if (text.find('.') == std::string::npos) text.insert(std::min(text.find('e'), text.size()), ".0");
  return text;
}

std::string write_bool(bool value) { return value ? "true" : "false"; }

}  // namespace longstraw::core::config
