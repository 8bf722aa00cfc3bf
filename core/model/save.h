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
// the folder the decoder was read from, has: prefixes, fused experts, copies of tied weights; constants and tensors that the
// decoder does not run (a vision tower, multi-token prediction) are carried over bit for bit. Weights are written in the decoder's
// dtype (8-bit weights with scales are not written back as such, those that are not run neither: they become the decoder's dtype,
// and the quantization_config goes), and config.json's dtype says so. config.json, generation_config.json, tokenizer and template
// files are copied. Weights that have adapters are written merged with them, as the decoder computes at the time (lora.h,
// WithoutAdapters). Reads back bit for bit. Every file is on the disk when it returns. Throws IoError naming the file (disk full),
// FormatError when `source` has other tensors or constants than the decoder, ConfigError when it is `folder`.
void save_checkpoint(const Decoder& decoder, const std::filesystem::path& source, const std::filesystem::path& folder,
                     const SaveOptions& options = {});

// target ← alpha · source + (1 - alpha) · target, over all weights, in float32 or wider, rounded once; alpha 1 copies bit for bit.
// A source with adapters counts as merged. Throws ConfigError when the two have other weights, or when `target` has adapters.
void mix_into(Decoder& target, const Decoder& source, double alpha);

}  // namespace longstraw::core::model
