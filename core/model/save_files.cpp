#include "core/model/save_files.h"

#include "core/base/atomic_file.h"
#include "core/base/errors.h"
#include "core/device/device.h"
#include "core/model/json_reader.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <regex>
#include <sstream>
#include <vector>

namespace longstraw::core::model {

namespace {

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw IoError(fmt::format("{}: reading failed", path.string()));
  return text.str();
}

void set_dtype(nlohmann::json& config, const std::string& dtype, bool needs_one) {
  config.erase("quantization_config");
  bool found = false;
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (!config.contains(key)) continue;
    config[key] = dtype;
    found = true;
  }
  if (!found && needs_one) config["torch_dtype"] = dtype;  // the older key: newer readers know it too
}

bool is_companion(const std::filesystem::path& file) {
  const std::string name = file.filename().string();
  constexpr std::array kNot{"config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json", "adapter_config.json"};
  if (name.starts_with('.') || std::find(kNot.begin(), kNot.end(), name) != kNot.end()) return false;
  constexpr std::array kExtensions{".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"};
  if (std::find(kExtensions.begin(), kExtensions.end(), file.extension()) != kExtensions.end()) return true;
  return name.starts_with("LICENSE") || name.starts_with("NOTICE");
}

}  // namespace

void write_text(const std::filesystem::path& path, const std::string& text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

void write_config(const std::filesystem::path& source, const std::filesystem::path& folder, c10::ScalarType dtype) {
  const auto file = source / "config.json";
  nlohmann::json config = read_json(file.string()).json();
  const std::string name = device::dtype_name(dtype);
  set_dtype(config, name, /*needs_one=*/true);
  if (config.contains("text_config") && config["text_config"].is_object()) set_dtype(config["text_config"], name, false);
  std::string text = config.dump(2) + "\n";
  // Numbers that JSON does not know were spelt out by read_json, unless the file has them so.
  if (read_text(file).find("__float__") == std::string::npos) {
    text = std::regex_replace(text, std::regex(R"re(\{\s*"__float__":\s*"(-?Infinity|NaN)"\s*\})re"), "$1");
  }
  write_text(folder / "config.json", text);
}

void copy_companions(const std::filesystem::path& source, const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(source)) {
    if (entry.is_regular_file() && is_companion(entry.path())) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const auto& file : files) write_text(folder / file.filename(), read_text(file));
}

void sync_folder(const std::filesystem::path& folder) {
  const int handle = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool ok = handle >= 0 && ::fsync(handle) == 0;
  const int error = errno;
  if (handle >= 0) ::close(handle);
  if (!ok) throw IoError(fmt::format("{}: can't be synced: {}", folder.string(), std::strerror(error)));
}

}  // namespace longstraw::core::model
