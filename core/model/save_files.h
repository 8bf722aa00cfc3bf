#pragma once
// The files of a checkpoint beside its tensors.

#include <c10/core/ScalarType.h>

#include <filesystem>
#include <string>

namespace longstraw::core::model {

// Whole or not at all, on the disk when it returns. Throws IoError naming the file.
void write_text(const std::filesystem::path& file, const std::string& text);

// source/config.json with the dtype (under the key, dtype or torch_dtype, that it has) and without quantization_config, in a
// multimodal one's text_config too.
void write_config(const std::filesystem::path& source, const std::filesystem::path& folder, c10::ScalarType dtype);

// What makes a checkpoint usable beside config.json and tensors: generation_config.json, tokenizer, chat templates, processors,
// licence. Nothing that is or describes weights.
void copy_companions(const std::filesystem::path& source, const std::filesystem::path& folder);

// The names in a folder reach the disk apart from the files' bytes.
void sync_folder(const std::filesystem::path& folder);

}  // namespace longstraw::core::model
