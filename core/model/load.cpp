// Weights of a checkpoint folder into the decoder that its config.json describes.
#include "core/base/errors.h"
#include "core/device/device.h"
#include "core/model/checkpoint.h"
#include "core/model/decoder.h"
#include "core/model/registry.h"
#include "core/model/tensor_sources.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <future>

namespace longstraw::core::model {

namespace {

void check_tied_copy(const Checkpoint::Entry& copy, const Checkpoint::Entry& embedding, const std::string& embedding_name) {
  const auto a = copy.tensor->bytes, b = embedding.tensor->bytes;
  if (std::equal(a.begin(), a.end(), b.begin(), b.end())) return;
  throw FormatError(fmt::format("{}: tensor {}: differs from {}, but config.json says tie_word_embeddings",
                                copy.file->path().string(), copy.tensor->name, embedding_name));
}

}  // namespace

std::unique_ptr<Decoder> load_decoder(const std::filesystem::path& folder, at::ScalarType dtype, at::Device device) {
  auto decoder = std::make_unique<Decoder>(read_parts(folder));
  const Architecture& architecture = decoder->architecture();
  const Family& family = family_of(architecture.model_type, (folder / "config.json").string());
  const Checkpoint checkpoint(folder);
  const auto& wanted = decoder->parts_.builder.parameters;
  const TensorSources sources =
      find_sources(checkpoint, wanted, architecture, family.layout != nullptr ? family.layout(architecture) : CheckpointLayout{});

  // Hashing and converting read the same pages; side by side they take the time of one.
  auto sha256 = std::async(std::launch::async, [&] { return checkpoint.sha256(); });
  decoder->dtype_ = dtype;
  decoder->device_ = device;
  for (size_t i = 0; i < wanted.size(); ++i) {
    Parameter& parameter = *wanted[i];
    const TensorSource& source = sources.of_parameter[i];
    if (sources.output_copy && &parameter == decoder->parts_.embedding)
      check_tied_copy(*sources.output_copy, source.stored, parameter.name);
    const auto kept = parameter.trained ? dtype : device::accumulation_dtype(dtype);
    parameter.value =
        read_source(source, parameter, architecture.scale_blocks, kept).to(device).set_requires_grad(parameter.trained);
    if (parameter.trained) decoder->weights_.push_back(wanted[i]);
  }
  decoder->parameters_ = decoder->weights_;
  decoder->notes_ = sources.notes;
  decoder->sha256_ = sha256.get();
  return decoder;
}

}  // namespace longstraw::core::model
