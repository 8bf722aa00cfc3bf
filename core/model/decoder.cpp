#include "core/model/decoder.h"

#include "core/base/errors.h"
#include "core/model/checkpoint.h"
#include "core/model/registry.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <future>
#include <set>

namespace longstraw::core::model {

namespace {

// Tensors that some checkpoints carry and that follow from the rest: the table of rotary frequencies that old versions
// stored, and a second copy of a tied embedding.
bool is_redundant(const std::string& name, const Architecture& architecture) {
  return name.ends_with(".rotary_emb.inv_freq") || (architecture.tied_embeddings && name == "lm_head.weight");
}

// All faults at once: a checkpoint of another model differs in many names, and the list says which model it is.
void check_names_and_shapes(const Checkpoint& checkpoint, const std::vector<ParameterShape>& wanted,
                            const Architecture& architecture) {
  std::vector<std::string> faults;
  std::set<std::string> known;
  for (const auto& [name, shape] : wanted) {
    known.insert(name);
    const auto found = checkpoint.tensors().find(name);
    if (found == checkpoint.tensors().end()) {
      faults.push_back(fmt::format("{}: missing, wanted {}", name, to_string(shape)));
      continue;
    }
    const StoredTensor& tensor = *found->second.tensor;
    if (tensor.shape != shape)
      faults.push_back(fmt::format("{}: shape {}, wanted {}", name, to_string(tensor.shape), to_string(shape)));
    if (!is_floating(tensor.dtype))
      faults.push_back(fmt::format("{}: dtype {}, wanted a floating-point one", name, name_of(tensor.dtype)));
  }
  for (const auto& [name, entry] : checkpoint.tensors()) {
    if (!known.contains(name) && !is_redundant(name, architecture)) {
      faults.push_back(fmt::format("{}: unexpected in a {} model of this config.json", name, architecture.model_type));
    }
  }
  if (faults.empty()) return;
  throw FormatError(fmt::format("{}: {} parameter{} do{} not fit config.json:\n  {}", checkpoint.folder().string(), faults.size(),
                                faults.size() == 1 ? "" : "s", faults.size() == 1 ? "es" : "", fmt::join(faults, "\n  ")));
}

void check_tied_copy(const Checkpoint& checkpoint, const Architecture& architecture, const ParameterShape& embedding) {
  const auto copy = checkpoint.tensors().find("lm_head.weight");
  if (!architecture.tied_embeddings || copy == checkpoint.tensors().end()) return;
  const auto original = checkpoint.tensors().find(embedding.name);
  const auto a = copy->second.tensor->bytes, b = original->second.tensor->bytes;
  if (!std::equal(a.begin(), a.end(), b.begin(), b.end())) {
    throw FormatError(fmt::format("{}: tensor lm_head.weight: differs from {}, but config.json says tie_word_embeddings",
                                  copy->second.file->path().string(), embedding.name));
  }
}

}  // namespace

std::unique_ptr<Decoder> load_decoder(const std::filesystem::path& folder, at::ScalarType dtype, at::Device device) {
  const Architecture architecture = read_architecture(folder);
  const Family& family = family_of(architecture.model_type, (folder / "config.json").string());
  const Checkpoint checkpoint(folder);
  const auto wanted = family.parameters(architecture);
  check_names_and_shapes(checkpoint, wanted, architecture);
  check_tied_copy(checkpoint, architecture, wanted.front());

  // Hashing and converting read the same pages; side by side they take the time of one.
  auto sha256 = std::async(std::launch::async, [&] { return checkpoint.sha256(); });
  DecoderParts parts;
  parts.architecture = architecture;
  parts.dtype = dtype;
  parts.device = device;
  for (const auto& [name, shape] : wanted) {
    const auto& entry = checkpoint.tensors().at(name);
    auto parameter = std::make_shared<Parameter>();
    parameter->name = name;
    parameter->value = read_tensor(*entry.file, *entry.tensor).to(device, dtype).set_requires_grad(true);
    parts.parameters.push_back(std::move(parameter));
  }
  parts.sha256 = sha256.get();
  return family.build(std::move(parts));
}

}  // namespace longstraw::core::model
