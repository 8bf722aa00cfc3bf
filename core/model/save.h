#pragma once
// Writes a decoder's weights as a Hugging Face checkpoint that loads as the one it came from did.

#include "core/model/decoder.h"

#include <cstdint>
#include <filesystem>

namespace longstraw::core::model {

struct SaveOptions {
  std::int64_t max_shard_bytes = std::int64_t{5} << 30;
};

// Into `folder`, which must exist: model.safetensors (or shards and their index), with the names and the layout that `source`,
// the folder the decoder was read from, has: prefixes, fused experts, copies of tied weights; tensors that the decoder does not
// train or run (a vision tower, multi-token prediction) are carried over bit for bit. Trained weights are written in the decoder's
// dtype (8-bit weights with scales are not written back as such: they become bfloat16 or the decoder's dtype, and the
// quantization_config goes), and config.json's dtype says so. config.json, generation_config.json, tokenizer and
// template files are copied. Reads back bit for bit. Throws IoError naming the file (disk full), FormatError when `source` is no
// longer what the decoder was read from.
void save_checkpoint(const Decoder& decoder, const std::filesystem::path& source, const std::filesystem::path& folder,
                     const SaveOptions& options = {});

}  // namespace longstraw::core::model
