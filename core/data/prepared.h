#pragma once
// A data set of prompts in tokens, whatever its file: JSONL or Parquet, texts, chat messages or token ids.

#include "core/data/prompts.h"
#include "core/data/reward_process.h"

#include <filesystem>
#include <vector>

namespace longstraw::core::data {

// The rows of `path`, each with prompt_ids: those of the file, or what the tokenizer and chat template of the checkpoint `model`
// make of its prompt (python/longstraw/prepare.py, in `python` if given, else in a process of its own; a JSONL file that has all
// ids needs none). Throws FormatError naming file, row, column and value for a data set that can't be used, and for a checkpoint
// without a tokenizer where one is needed; ProcessError when the process dies.
std::vector<PromptRow> prepared_prompts(const std::filesystem::path& path, const std::filesystem::path& model,
                                        ScoringProcess* python = nullptr);

}  // namespace longstraw::core::data
