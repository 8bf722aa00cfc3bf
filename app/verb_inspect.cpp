// longstraw inspect: what is in a checkpoint, a tensor file, a rollouts or prompts file, or a record, without loading it whole.

#include "app/command_line.h"
#include "app/inspect_text.h"

#include "core/data/describe.h"
#include "core/device/device.h"
#include "core/model/checkpoint.h"
#include "core/model/describe.h"
#include "core/record/reader.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cstdio>
#include <fstream>
#include <optional>

namespace longstraw::app {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// A bound that keeps products with bytes a token, which reach millions, within 64 bits.
constexpr int64_t kMostTokens = 1'000'000'000'000;

struct InspectOptions {
  ConfigOptions config;
  std::string path;
  std::optional<int64_t> tokens;
  std::optional<std::string> dtype;
  bool json = false;
};

Json describe_checkpoint(const fs::path& folder, const InspectOptions& options) {
  Json out{{"format", "checkpoint"}, {"folder", folder.string()}};
  core::model::DescribeOptions wanted{.tokens = options.tokens};
  if (options.dtype) wanted.dtype = core::device::parse_dtype(*options.dtype);
  out.update(core::model::describe(folder, wanted));
  return out;
}

Json describe_tensors(const fs::path& path) {
  const core::model::SafetensorsFile file(path);
  Json tensors = Json::array();
  int64_t elements = 0;
  for (const auto& tensor : file.tensors()) {
    elements += core::model::element_count(tensor.shape);
    tensors.push_back({{"name", tensor.name},
                       {"dtype", core::model::name_of(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"bytes", tensor.bytes.size()}});
  }
  return {{"format", "safetensors"}, {"file", path.string()},       {"bytes", fs::file_size(path)},
          {"elements", elements},    {"metadata", file.metadata()}, {"tensors", tensors}};
}

bool starts_as_hdf5(const fs::path& path) {
  constexpr std::array<char, 4> kSignature{'\x89', 'H', 'D', 'F'};
  std::array<char, 4> start{};
  std::ifstream file(path, std::ios::binary);
  file.read(start.data(), start.size());
  return file.gcount() == std::streamsize(start.size()) && start == kSignature;
}

Json describe_any(const fs::path& path, const InspectOptions& options) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) throw FormatError(fmt::format("{}: there is no such file or folder", path.string()));
  if (fs::is_directory(path, ignored)) return describe_checkpoint(path, options);
  if (options.tokens || options.dtype) {
    throw ConfigError(fmt::format("{}: {}: only of a checkpoint folder", options.tokens ? "--tokens" : "--dtype", path.string()));
  }
  const std::string extension = path.extension().string();
  if (extension == ".safetensors") return describe_tensors(path);
  if (extension == ".h5" || extension == ".hdf5" || starts_as_hdf5(path)) return core::record::describe(path.string());
  return core::data::is_rollouts_file(path) ? core::data::describe_rollouts(path) : core::data::describe_prompts(path);
}

ExitStatus run_inspect(const InspectOptions& options, const RunConfig& config) {
  const std::string path = options.path.empty() ? config.model.path : options.path;
  if (path.empty()) throw ConfigError("FILE: not given, wanted a checkpoint folder, .safetensors, .jsonl or record");
  const Json description = describe_any(path, options);
  const auto replace = Json::error_handler_t::replace;
  const std::string text = options.json ? description.dump(2, ' ', false, replace) + "\n" : readable_text(description);
  std::fputs(text.c_str(), stdout);
  return ExitStatus::kWithinBounds;
}

}  // namespace

void add_inspect(CLI::App& program, Action& chosen) {
  CLI::App& verb = *program.add_subcommand("inspect", "what is in a checkpoint, rollouts file or record, without loading it whole");
  const auto options = std::make_shared<InspectOptions>();
  verb.add_option("FILE", options->path,
                  "checkpoint folder (config.json alone will do), .safetensors, rollouts or prompts (.jsonl), or record (.h5); "
                  "without it the key model.path");
  verb.add_option("--tokens", options->tokens, "of a checkpoint: also what a prefix of so many tokens leaves for later ones")
      ->check(CLI::Range(int64_t{1}, kMostTokens));
  verb.add_option("--dtype", options->dtype,
                  "of a checkpoint: dtype of its prompt state (float64, float32, bfloat16; default: that of the weights)");
  verb.add_flag("--json", options->json, "as JSON");
  add_config_options(verb, options->config);
  choose(verb, chosen, options, run_inspect);
}

}  // namespace longstraw::app
