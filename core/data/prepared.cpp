#include "core/data/prepared.h"

#include "core/base/errors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

namespace longstraw::core::data {
namespace {

namespace fs = std::filesystem;

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (fs::temp_directory_path() / "longstraw-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) {
      throw IoError(fmt::format("{}: can't be made: {}", pattern, std::strerror(errno)));
    }
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

}  // namespace

std::vector<PromptRow> prepared_prompts(const fs::path& path, const fs::path& model, ScoringProcess* python) {
  if (!is_parquet(path)) {
    std::vector<PromptRow> rows = read_prompts(path);
    if (std::all_of(rows.begin(), rows.end(), [](const PromptRow& row) { return row.prompt_ids.has_value(); })) return rows;
  }
  std::optional<ScoringProcess> own;
  if (python == nullptr) python = &own.emplace(ScoringOptions{});
  const TemporaryFolder folder;
  const fs::path out = folder.path() / "prompts.jsonl";
  python->prepare_prompts(path, model, out);
  return read_prompts(out);
}

}  // namespace longstraw::core::data
