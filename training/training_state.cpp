#include "training/training_state.h"

#include "core/base/errors.h"
#include "core/model/adapters.h"
#include "core/model/checkpoint.h"
#include "core/model/json_reader.h"
#include "core/model/lora.h"
#include "core/model/safetensors.h"
#include "core/model/save.h"
#include "core/model/save_files.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <charconv>
#include <cstring>
#include <fstream>
#include <map>

namespace longstraw::training {

namespace {

namespace fs = std::filesystem;
using core::model::Decoder;
using core::model::SafetensorsFile;
using core::model::StoredTensor;
using nlohmann::json;

constexpr const char* kFormat = "longstraw-training-state";
constexpr int64_t kFormatVersion = 1;
constexpr const char* kOptimizerFile = "training_state/optimizer.safetensors";
constexpr const char* kReferenceFile = "training_state/reference_model.safetensors";
constexpr const char* kAdapterFile = "adapter_config.json";
constexpr const char* kSteps = "steps";

json to_json(const TrainerState& state) {
  return {{"format", kFormat},
          {"format_version", kFormatVersion},
          {"step", state.step},
          {"generation", state.generation},
          {"epoch", state.epoch},
          {"position", state.position},
          {"num_tokens", state.num_tokens},
          {"metrics_bytes", state.metrics_bytes},
          {"best_eval", state.best_eval ? json(*state.best_eval) : json()},
          {"best_step", state.best_step},
          {"extra", state.extra}};
}

using Tensors = std::map<std::string, at::Tensor>;

void write_tensors(const fs::path& file, const Tensors& tensors, const std::map<std::string, std::string>& metadata) {
  std::vector<at::Tensor> keep;  // what the bytes live in
  std::vector<StoredTensor> stored;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor& value = keep.emplace_back(tensor.detach().to(at::kCPU).contiguous());
    stored.push_back({.name = name,
                      .dtype = core::model::stored_dtype(value.scalar_type()),
                      .shape = value.sizes().vec(),
                      .bytes = {static_cast<const std::byte*>(value.const_data_ptr()), value.nbytes()}});
  }
  core::model::write_safetensors(file, stored, metadata);
}

// Bits as they are, not finite ones too. The mapped bytes themselves where they lie as a tensor must: `file` outlives it.
at::Tensor view_of(const StoredTensor& stored) {
  const auto options = at::TensorOptions().dtype(core::model::scalar_type(stored.dtype));
  const auto size = static_cast<uintptr_t>(core::model::bytes_per_element(stored.dtype));
  if (!stored.bytes.empty() && reinterpret_cast<uintptr_t>(stored.bytes.data()) % size == 0) {
    return at::from_blob(const_cast<std::byte*>(stored.bytes.data()), stored.shape, options);
  }
  at::Tensor copy = at::empty(stored.shape, options);
  if (!stored.bytes.empty()) std::memcpy(copy.mutable_data_ptr(), stored.bytes.data(), stored.bytes.size());
  return copy;
}

Tensors weights_of(const Decoder& decoder) {
  Tensors tensors;
  for (const auto& weight : decoder.weights()) tensors[weight->name] = weight->value;
  return tensors;
}

// The trained weights of a checkpoint that save_checkpoint wrote.
void restore_weights(const fs::path& checkpoint, Decoder& decoder) {
  // On the CPU: a device may have no room for a second copy.
  const auto saved = core::model::load_decoder(checkpoint, decoder.dtype(), at::kCPU);
  const auto& from = saved->weights();
  const auto& to = decoder.weights();
  for (size_t i = 0; i < std::max(from.size(), to.size()); ++i) {
    if (i < from.size() && i < to.size() && from[i]->name == to[i]->name && from[i]->shape == to[i]->shape) continue;
    const auto text = [i](const auto& weights) {
      return i < weights.size() ? weights[i]->name + " " + core::model::to_string(weights[i]->shape) : "nothing";
    };
    throw FormatError(fmt::format("{}: weights of another model: {}, wanted {}", checkpoint.string(), text(from), text(to)));
  }
  core::model::mix_into(decoder, *saved, 1.0);
}

int64_t steps_of(const SafetensorsFile& file) {
  const auto found = file.metadata().find(kSteps);
  int64_t steps = -1;
  if (found != file.metadata().end()) {
    const std::string& text = found->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), steps);
    if (error != std::errc() || end != text.data() + text.size()) steps = -1;
  }
  if (steps < 0) throw FormatError(fmt::format("{}: metadata {}: not a number of steps", file.path().string(), kSteps));
  return steps;
}

void restore_optimizer(const fs::path& path, core::optim::Optimizer& optimizer) {
  const SafetensorsFile file(path);
  Tensors state;
  for (const StoredTensor& stored : file.tensors()) state[stored.name] = view_of(stored);
  try {
    optimizer.load_state(state, steps_of(file));
  } catch (const FormatError& error) {
    throw FormatError(fmt::format("{}: {}", path.string(), error.what()));
  }
}

void restore_reference(const fs::path& path, Decoder& reference) {
  const at::NoGradGuard no_grad;
  const SafetensorsFile file(path);
  for (const auto& weight : reference.weights()) {
    const StoredTensor* stored = file.find(weight->name);
    if (stored == nullptr) throw FormatError(fmt::format("{}: {}: missing", path.string(), weight->name));
    if (stored->shape != weight->shape || core::model::scalar_type(stored->dtype) != weight->value.scalar_type()) {
      throw FormatError(fmt::format(
          "{}: {}: {} {}, wanted {} {}", path.string(), weight->name, name_of(stored->dtype), core::model::to_string(stored->shape),
          name_of(core::model::stored_dtype(weight->value.scalar_type())), core::model::to_string(weight->shape)));
    }
    weight->value.copy_(view_of(*stored));
  }
}

int64_t whole_number(const core::model::JsonReader& state, const char* key, int64_t least) {
  const auto found = state.json().find(key);
  if (found == state.json().end() || !found->is_number_integer() || found->get<int64_t>() < least) {
    state.refuse(key, fmt::format("a whole number of at least {}", least));
  }
  return found->get<int64_t>();
}

}  // namespace

void write_contents(const CheckpointContents& contents, const fs::path& folder, const std::function<void()>& before_write) {
  const auto announce = [&] {
    if (before_write) before_write();
  };
  const auto make_folder = [&](const fs::path& path) {
    announce();
    std::error_code error;
    fs::create_directories(path, error);
    if (error) throw IoError(fmt::format("{}: can't be made: {}", path.string(), error.message()));
  };
  make_folder(folder);
  make_folder((folder / kStateFile).parent_path());
  announce();
  if (contents.adapters) {
    core::model::save_adapter(contents.decoder, contents.model_source.string(), folder);
    if (contents.merged) {
      make_folder(folder / "merged");
      core::model::save_checkpoint(contents.decoder, contents.model_source, folder / "merged");
    }
  } else {
    core::model::save_checkpoint(contents.decoder, contents.model_source, folder);
  }
  announce();
  write_tensors(folder / kOptimizerFile, contents.optimizer.state(), {{kSteps, std::to_string(contents.optimizer.steps())}});
  if (contents.reference_model != nullptr) {
    announce();
    write_tensors(folder / kReferenceFile, weights_of(*contents.reference_model), {});
  }
  announce();
  core::model::write_text(folder / kStateFile, to_json(contents.state).dump(1) + "\n");
}

TrainerState read_trainer_state(const fs::path& checkpoint) {
  const fs::path path = checkpoint / kStateFile;
  std::ifstream in(path);
  if (!in) throw FormatError(fmt::format("{}: no such file: {} is no checkpoint of a run", path.string(), checkpoint.string()));
  json object = json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) throw FormatError(fmt::format("{}: is no whole JSON object", path.string()));
  const core::model::JsonReader reader(path.string(), object);
  if (reader.text("format") != kFormat) reader.refuse("format", kFormat);
  if (whole_number(reader, "format_version", 1) > kFormatVersion) {
    reader.refuse("format_version", fmt::format("at most {}: it is of a later version of this program", kFormatVersion));
  }
  TrainerState state;
  state.step = whole_number(reader, "step", 0);
  state.generation = whole_number(reader, "generation", 0);
  state.epoch = whole_number(reader, "epoch", 0);
  state.position = whole_number(reader, "position", 0);
  state.num_tokens = whole_number(reader, "num_tokens", 0);
  state.metrics_bytes = whole_number(reader, "metrics_bytes", 0);
  if (reader.has("best_eval")) state.best_eval = reader.number("best_eval", 0.0);
  state.best_step = whole_number(reader, "best_step", -1);
  if (!object.contains("extra") || !object["extra"].is_object()) reader.refuse("extra", "an object");
  state.extra = object["extra"];
  return state;
}

void restore(const fs::path& checkpoint, Decoder& decoder, core::optim::Optimizer& optimizer, Decoder* reference_model) {
  const bool adapters = decoder.adapters() != nullptr;
  if (fs::exists(checkpoint / kAdapterFile) != adapters) {
    throw FormatError(fmt::format("{}: holds {}, this run trains {} (section lora)", checkpoint.string(),
                                  adapters ? "weights" : "adapters", adapters ? "adapters" : "all weights"));
  }
  if (adapters) {
    core::model::read_adapter(decoder, checkpoint);
  } else {
    restore_weights(checkpoint, decoder);
  }
  restore_optimizer(checkpoint / kOptimizerFile, optimizer);
  if (reference_model != nullptr) restore_reference(checkpoint / kReferenceFile, *reference_model);
}

}  // namespace longstraw::training
