#pragma once
// Where weights lie for a server to read: FOLDER/step-<n>, a Hugging Face checkpoint each, whole or not there. The newest two are
// kept, as a server may still read the older one.

#include "core/model/decoder.h"

#include <cstdint>
#include <filesystem>

namespace longstraw::training {

class ServerWeights {
 public:
  // `source`: the checkpoint that the decoder was read from. What an earlier run left in `folder` is removed at the first write.
  ServerWeights(const core::model::Decoder& decoder, std::filesystem::path source, std::filesystem::path folder);

  // Writes the decoder's weights, adapters merged, and returns their folder. Throws as core::model::save_checkpoint; what was
  // written before then stays.
  std::filesystem::path operator()(int64_t step);

 private:
  const core::model::Decoder* decoder_;
  std::filesystem::path source_, folder_, newest_;
};

}  // namespace longstraw::training
