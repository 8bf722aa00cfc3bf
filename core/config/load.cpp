#include "core/config/load.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

namespace longstraw::core::config {
namespace {

std::string joined(const std::string& section, const std::string& name) { return section.empty() ? name : section + "." + name; }

void collect_keys(const std::vector<Binding>& bindings, const std::string& section, std::vector<std::string>& keys) {
  for (const Binding& binding : bindings) {
    const std::string key = joined(section, binding.name);
    keys.push_back(key);
    collect_keys(binding.children, key, keys);
  }
}

std::string last_part(const std::string& key) { return key.substr(key.rfind('.') + 1); }

// Applies one tree of values to the bindings, or notes why not. `label` is the file, or the override's own text.
class Applier {
 public:
  Applier(std::string label, bool has_lines, std::vector<Binding>& bindings, Faults& faults)
      : label_(std::move(label)), has_lines_(has_lines), bindings_(bindings), faults_(faults) {}

  void apply_root(const Value& root) {
    if (root.kind == Value::Kind::kNull) return;  // an empty file: all defaults
    if (root.kind != Value::Kind::kMap) {
      faults_.add(where(root.line), "", "got " + describe(root) + ", wanted sections with keys");
      return;
    }
    apply_map(root, bindings_, "");
  }

  void apply_at(const std::string& key, const Value& value) {
    std::vector<Binding>* level = &bindings_;
    for (std::size_t begin = 0;;) {
      const std::size_t end = key.find('.', begin);
      Binding* binding = find(*level, key.substr(begin, end - begin));
      if (binding == nullptr || (end != std::string::npos && !binding->is_section())) return unknown(key, value.line);
      if (end == std::string::npos) return apply(*binding, key, value);
      level = &binding->children;
      begin = end + 1;
    }
  }

 private:
  std::string where(int line) const { return has_lines_ ? label_ + ":" + std::to_string(line) : label_; }

  static Binding* find(std::vector<Binding>& level, const std::string& name) {
    const auto found = std::find_if(level.begin(), level.end(), [&](const Binding& b) { return b.name == name; });
    return found == level.end() ? nullptr : &*found;
  }

  void apply(Binding& binding, const std::string& key, const Value& value) {
    if (!binding.is_section()) {
      if (const Problem problem = binding.read(value)) faults_.add(where(value.line), key, *problem);
    } else if (value.kind == Value::Kind::kMap) {
      apply_map(value, binding.children, key);
    } else if (value.kind != Value::Kind::kNull) {  // a section with all its keys commented out is null
      faults_.add(where(value.line), key, "got " + describe(value) + ", wanted a section with keys");
    }
  }

  void apply_map(const Value& map, std::vector<Binding>& level, const std::string& section) {
    std::vector<std::pair<std::string, int>> seen;
    for (std::size_t i = 0; i < map.keys.size(); ++i) {
      const Value& name = map.keys[i];
      if (name.kind != Value::Kind::kScalar) {
        faults_.add(where(name.line), section, "got " + describe(name) + " as a key, wanted a name");
        continue;
      }
      const std::string key = joined(section, name.text);
      const auto before = std::find_if(seen.begin(), seen.end(), [&](const auto& s) { return s.first == name.text; });
      if (before != seen.end()) {
        const std::string line = has_lines_ ? ", first in line " + std::to_string(before->second) : "";
        faults_.add(where(name.line), key, "the key occurs twice" + line);
        continue;
      }
      seen.emplace_back(name.text, name.line);
      if (Binding* binding = find(level, name.text)) {
        apply(*binding, key, map.items[i]);
      } else {
        unknown(key, name.line);
      }
    }
  }

  void unknown(const std::string& key, int line) {
    std::string problem = "unknown key";
    if (const auto near = nearest_key(key)) problem += "; did you mean " + *near + "?";
    faults_.add(where(line), key, problem);
  }

  // A misspelt key, or else one that is spelt (almost) right but stands in the wrong section.
  std::optional<std::string> nearest_key(const std::string& key) const {
    std::vector<std::string> keys;
    collect_keys(bindings_, "", keys);
    const std::string section = key.substr(0, key.size() - last_part(key).size());
    const auto is_sibling = [&](const std::string& known) {
      return known.size() - last_part(known).size() == section.size() && known.starts_with(section);
    };
    std::vector<std::string> names, siblings;
    for (const std::string& known : keys) {
      names.push_back(last_part(known));
      if (is_sibling(known)) siblings.push_back(names.back());
    }
    if (const auto near = nearest(last_part(key), siblings)) return section + *near;
    if (const auto near = nearest(last_part(key), names)) {
      return keys[static_cast<std::size_t>(std::find(names.begin(), names.end(), *near) - names.begin())];
    }
    return nearest(key, keys);
  }

  std::string label_;
  bool has_lines_;
  std::vector<Binding>& bindings_;
  Faults& faults_;
};

void dump_level(const std::vector<Binding>& bindings, int indent, std::string& out) {
  for (const Binding& binding : bindings) {
    out += std::string(static_cast<std::size_t>(indent), ' ') + binding.name + ":";
    if (binding.is_section()) {
      out += "\n";
      dump_level(binding.children, indent + 2, out);
    } else {
      out.append(" ").append(binding.write()).append("\n");
    }
  }
}

struct HelpLine {
  std::string key;
  std::string comment;
};

void help_level(const std::vector<Binding>& bindings, int indent, std::vector<HelpLine>& lines) {
  for (const Binding& binding : bindings) {
    const std::string key = std::string(static_cast<std::size_t>(indent), ' ') + binding.name + ":";
    if (binding.is_section()) {
      lines.push_back({key, binding.help});
      help_level(binding.children, indent + 2, lines);
    } else {
      lines.push_back({key + " " + binding.write(), binding.help + " (" + binding.wanted + ")"});
    }
  }
}

void diff_level(const std::vector<Binding>& first, const std::vector<Binding>& second, const std::string& section,
                std::vector<Difference>& out) {
  for (std::size_t i = 0; i < first.size(); ++i) {
    const std::string key = joined(section, first[i].name);
    if (first[i].is_section()) {
      diff_level(first[i].children, second[i].children, key, out);
    } else if (first[i].write() != second[i].write()) {
      out.push_back({key, first[i].write(), second[i].write()});
    }
  }
}

}  // namespace

void apply_text(const std::string& yaml, const std::string& label, std::vector<Binding>& bindings, Faults& faults) {
  const ParsedYaml parsed = parse_yaml(yaml);
  if (parsed.fault) {
    faults.add(label + ":" + std::to_string(parsed.fault_line), "", *parsed.fault);
    return;
  }
  Applier(label, true, bindings, faults).apply_root(parsed.root);
}

void apply_file(const std::filesystem::path& file, std::vector<Binding>& bindings, Faults& faults) {
  constexpr std::size_t kLargest = 1 << 20;  // a checkpoint given by mistake need not be read whole
  std::error_code ignored;
  if (std::filesystem::is_directory(file, ignored)) {
    return faults.add(file.string(), "", "is a folder, wanted a YAML file");
  }
  errno = 0;
  std::ifstream stream(file, std::ios::binary);
  if (!stream) return faults.add(file.string(), "", std::string("can't be read: ") + std::strerror(errno));
  std::string text(kLargest + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(stream.gcount()));
  if (stream.bad()) return faults.add(file.string(), "", "reading failed");
  if (text.size() > kLargest) return faults.add(file.string(), "", "more than 1 MiB, wanted a YAML configuration");
  apply_text(text, file.string(), bindings, faults);
}

void apply_override(const std::string& override_text, std::vector<Binding>& bindings, Faults& faults) {
  const std::string label = "--set " + override_text;
  const std::size_t equals = override_text.find('=');
  if (equals == std::string::npos || equals == 0) return faults.add(label, "", "wanted key.path=value");
  const ParsedYaml parsed = parse_yaml(override_text.substr(equals + 1));
  const std::string key = override_text.substr(0, equals);
  if (parsed.fault) return faults.add(label, key, *parsed.fault);
  Applier(label, false, bindings, faults).apply_at(key, parsed.root);
}

std::string dump(const std::vector<Binding>& bindings) {
  std::string out;
  dump_level(bindings, 0, out);
  return out;
}

std::string help(const std::vector<Binding>& bindings) {
  std::vector<HelpLine> lines;
  help_level(bindings, 0, lines);
  std::size_t width = 0;
  for (const HelpLine& line : lines) width = std::max(width, line.key.size());
  std::string out;
  for (const HelpLine& line : lines) {
    out += line.key + std::string(width + 2 - line.key.size(), ' ') + "# " + line.comment + "\n";
  }
  return out;
}

std::vector<Difference> diff(const std::vector<Binding>& first, const std::vector<Binding>& second) {
  std::vector<Difference> out;
  diff_level(first, second, "", out);
  return out;
}

}  // namespace longstraw::core::config
