#include "training/prompt_set.h"

#include "core/base/errors.h"
#include "core/base/sha256.h"
#include "core/data/prepared.h"

#include <fmt/format.h>

#include <algorithm>

namespace longstraw::training {
namespace {

namespace fs = std::filesystem;
using core::data::PromptRow;

void check_ids(const std::vector<int64_t>& ids, const std::string& place, const PromptSetOptions& options) {
  if (ids.empty()) throw FormatError(place + ": the prompt has no token");
  const auto outside = std::find_if(ids.begin(), ids.end(), [&](int64_t id) { return id < 0 || id >= options.vocab; });
  if (outside == ids.end()) return;
  throw FormatError(fmt::format("{}: prompt_ids: got {} at {}, wanted 0 to {} (the vocabulary of {})", place, *outside,
                                outside - ids.begin(), options.vocab - 1, options.model.string()));
}

}  // namespace

bool has_tokenizer(const fs::path& model) {
  std::error_code ignored;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"}) {
    if (fs::exists(model / name, ignored)) return true;
  }
  return false;
}

PromptSet::PromptSet(const fs::path& path, const PromptSetOptions& options)
    : rows_(core::data::prepared_prompts(path, options.model, options.tokenizer)) {
  for (const PromptRow& row : rows_) {
    const std::string place = fmt::format("{}: prompt {}", path.string(), row.prompt_id);
    EncodedPrompt prompt{&row, *row.prompt_ids};
    check_ids(prompt.ids, place, options);
    const int64_t tokens = int64_t(prompt.ids.size()), most = options.max_prompt_length.value_or(tokens);
    if (tokens > most) {
      if (options.long_prompt == LongPrompt::kError) {
        throw FormatError(
            fmt::format("{}: {} tokens, wanted at most train.max_prompt_length, {} (train.long_prompt: left_truncate "
                        "or skip go on)",
                        place, tokens, most));
      }
      if (options.long_prompt == LongPrompt::kSkip) {
        ++skipped_;
        continue;
      }
      prompt.ids.erase(prompt.ids.begin(), prompt.ids.end() - most);
      ++truncated_;
    }
    prompts_.push_back(std::move(prompt));
  }
  if (prompts_.empty()) {
    throw FormatError(fmt::format("{}: {}: every prompt is longer than train.max_prompt_length, {}", path.string(), options.key,
                                  options.max_prompt_length.value_or(0)));
  }
}

int64_t PromptSet::longest() const {
  size_t longest = 0;
  for (const auto& prompt : prompts_) longest = std::max(longest, prompt.ids.size());
  return int64_t(longest);
}

std::string PromptSet::sha256() const {
  Sha256 hash;
  const auto add = [&hash](const std::string& text) {
    const uint64_t bytes = text.size();
    hash.update(&bytes, sizeof bytes);
    hash.update(text);
  };
  add("longstraw prompts 1");
  for (const auto& prompt : prompts_) {
    add(prompt.row->prompt_id);
    const uint64_t tokens = prompt.ids.size();
    hash.update(&tokens, sizeof tokens);
    hash.update(prompt.ids.data(), prompt.ids.size() * sizeof(int64_t));
    add(prompt.row->columns.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
  }
  return hash.hex();
}

}  // namespace longstraw::training
