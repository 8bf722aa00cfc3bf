#pragma once
// A data set of prompts in tokens: read, tokenized, checked against the vocabulary, and the long ones dealt with, all before the
// first step.

#include "core/data/prompts.h"
#include "core/data/reward_process.h"
#include "training/config.h"
#include "training/rollout.h"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::training {

struct PromptSetOptions {
  std::string key;              // of the configuration, for messages: data.prompts
  std::filesystem::path model;  // checkpoint whose tokenizer is used
  int64_t vocab = 0;
  std::optional<int64_t> max_prompt_length = {};
  LongPrompt long_prompt = LongPrompt::kError;
  core::data::ScoringProcess* tokenizer = nullptr;  // of the checkpoint, where it runs already
};

class PromptSet {
 public:
  // FormatError naming file, prompt and what is wrong: no prompt, none that is short enough, a prompt without a token or too long,
  // an id outside the vocabulary, a text without a tokenizer.
  PromptSet(const std::filesystem::path& path, const PromptSetOptions& options);
  PromptSet(PromptSet&&) = default;
  PromptSet(const PromptSet&) = delete;  // prompts point to rows

  int64_t size() const { return int64_t(prompts_.size()); }
  const EncodedPrompt& operator[](int64_t n) const { return prompts_[size_t(n)]; }
  int64_t longest() const;
  int64_t skipped() const { return skipped_; }
  int64_t truncated() const { return truncated_; }
  // Over ids, names and columns, in order: which data a run was trained on.
  std::string sha256() const;

 private:
  std::vector<core::data::PromptRow> rows_;
  std::vector<EncodedPrompt> prompts_;  // point into rows_
  int64_t skipped_ = 0, truncated_ = 0;
};

// Whether a checkpoint folder has a tokenizer.
bool has_tokenizer(const std::filesystem::path& model);

}  // namespace longstraw::training
