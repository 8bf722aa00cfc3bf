#include "core/model/save.h"

#include "core/base/errors.h"
#include "core/device/device.h"
#include "core/model/adapters.h"
#include "core/model/registry.h"
#include "core/model/save_files.h"
#include "core/model/tensor_sources.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace longstraw::core::model {

namespace {

// A tensor to write: the stored one, or what the decoder makes of it.
struct Written {
  std::string name;
  StoredDtype dtype;
  Shape shape;
  const StoredTensor* carried = nullptr;  // bit for bit
  struct Part {
    const Parameter* parameter;
    const TensorSource* source;
  };
  std::vector<Part> parts = {};                  // the weights it consists of
  std::optional<TensorSource> dequantized = {};  // an 8-bit one that the decoder does not run

  int64_t bytes() const { return element_count(shape) * bytes_per_element(dtype); }
};

class Saver {
 public:
  Saver(const Decoder& decoder, const std::filesystem::path& source) : decoder_(decoder), checkpoint_(source) {
    const DecoderParts parts = read_parts(source);
    parameters_ = decoder.weights();
    const auto constants = decoder.constants();
    parameters_.insert(parameters_.end(), constants.begin(), constants.end());
    check_same(parts, source);
    const Family& family = family_of(parts.architecture.model_type, (source / "config.json").string());
    blocks_ = parts.architecture.scale_blocks;
    sources_ = find_sources(checkpoint_, parameters_, parts.architecture,
                            family.layout != nullptr ? family.layout(parts.architecture) : CheckpointLayout{});
    check_constants();
    plan();
  }

  const std::vector<Written>& written() const { return written_; }

  // The bytes to write; `keep` holds what they live in.
  StoredTensor stored(const Written& tensor, std::vector<at::Tensor>& keep) const {
    if (tensor.carried != nullptr) return *tensor.carried;
    keep.push_back(value_of(tensor).to(at::kCPU).contiguous());
    return {.name = tensor.name,
            .dtype = tensor.dtype,
            .shape = tensor.shape,
            .bytes = {static_cast<const std::byte*>(keep.back().const_data_ptr()), keep.back().nbytes()}};
  }

 private:
  void check_same(const DecoderParts& parts, const std::filesystem::path& source) const {
    std::map<std::string, Shape> wanted;
    for (const auto& parameter : parameters_) wanted[parameter->name] = parameter->shape;
    for (const auto& parameter : parts.builder.parameters) {
      const auto found = wanted.find(parameter->name);
      if (found == wanted.end() || found->second != parameter->shape) {
        throw FormatError(fmt::format("{}: {} {}: not in the model that is saved: it was read from another checkpoint",
                                      source.string(), parameter->name, to_string(parameter->shape)));
      }
      wanted.erase(found);
    }
    if (wanted.empty()) return;
    throw FormatError(fmt::format("{}: has no {}, which the model that is saved has: it was read from another checkpoint",
                                  source.string(), wanted.begin()->first));
  }

  void check_constants() const {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i]->trained) continue;
      const at::Tensor& value = parameters_[i]->value;
      const at::Tensor stored = read_source(sources_.of_parameter[i], *parameters_[i], blocks_, value.scalar_type());
      if (at::equal(stored, value.to(at::kCPU))) continue;
      throw FormatError(fmt::format("{}: tensor {}: other values than the model that is saved was read with",
                                    sources_.of_parameter[i].stored.file->path().string(), parameters_[i]->name));
    }
  }

  // In the order of the files and of the tensors in them.
  void plan() {
    std::map<const StoredTensor*, std::vector<Written::Part>> parts;
    std::set<const StoredTensor*> scales;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const TensorSource& source = sources_.of_parameter[i];
      if (!parameters_[i]->trained) continue;
      parts[source.stored.tensor].push_back({parameters_[i].get(), &source});
      if (source.scales) scales.insert(source.scales->tensor);
      // A stored copy of the embedding under the output's name.
      if (sources_.output_copy && parameters_[i].get() == &decoder_.output_weight())
        parts[sources_.output_copy->tensor].push_back({parameters_[i].get(), &source});
    }
    for (const SafetensorsFile& file : checkpoint_.files()) {
      for (const StoredTensor& tensor : file.tensors()) {
        if (scales.contains(&tensor)) continue;
        if (const auto found = parts.find(&tensor); found != parts.end()) {
          written_.push_back(
              {.name = tensor.name, .dtype = stored_dtype(decoder_.dtype()), .shape = tensor.shape, .parts = found->second});
        } else {
          plan_other(file, tensor);
        }
      }
    }
  }

  void plan_other(const SafetensorsFile& file, const StoredTensor& tensor) {
    const auto& all = checkpoint_.tensors();
    const auto is_scaled = [&](const std::string& name) {
      const auto found = all.find(name);
      return found != all.end() && found->second.tensor->dtype == StoredDtype::kF8E4m3 && found->second.tensor->shape.size() == 2 &&
             all.contains(name + std::string(kScaleSuffix));
    };
    if (tensor.name.ends_with(kScaleSuffix) && is_scaled(tensor.name.substr(0, tensor.name.size() - kScaleSuffix.size()))) return;
    Written written{.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape};
    if (is_scaled(tensor.name)) {
      written.dtype = stored_dtype(decoder_.dtype());
      written.dequantized = TensorSource{.stored = {&file, &tensor}, .scales = all.at(tensor.name + std::string(kScaleSuffix))};
    } else {
      written.carried = &tensor;
    }
    written_.push_back(std::move(written));
  }

  at::Tensor value_of(const Written& tensor) const {
    if (tensor.dequantized) {
      const Parameter unused{.name = tensor.name, .shape = tensor.shape};
      return read_source(*tensor.dequantized, unused, blocks_, decoder_.dtype());
    }
    const auto& [first, source] = tensor.parts.front();
    if (!source->expert) return merged_value(decoder_, *first).reshape(tensor.shape);
    at::Tensor whole = at::empty(tensor.shape, first->value.options().requires_grad(false));
    for (const auto& [parameter, part] : tensor.parts)
      whole[*part->expert].narrow(0, part->first_row, parameter->shape[0]).copy_(merged_value(decoder_, *parameter));
    return whole;
  }

  const Decoder& decoder_;
  Checkpoint checkpoint_;
  ScaleBlocks blocks_;
  std::vector<std::shared_ptr<Parameter>> parameters_;
  TensorSources sources_;
  std::vector<Written> written_;
};

// As many tensors a shard as fit, at least one.
std::vector<std::vector<const Written*>> into_shards(const std::vector<Written>& written, int64_t most) {
  std::vector<std::vector<const Written*>> shards(1);
  int64_t bytes = 0;
  for (const Written& tensor : written) {
    if (!shards.back().empty() && bytes + tensor.bytes() > most) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().push_back(&tensor);
    bytes += tensor.bytes();
  }
  return shards;
}

void write_shards(const Saver& saver, const std::filesystem::path& folder, int64_t most) {
  const auto shards = into_shards(saver.written(), most);
  nlohmann::json weight_map = nlohmann::json::object();
  int64_t total = 0;
  for (size_t n = 0; n < shards.size(); ++n) {
    const std::string file =
        shards.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", n + 1, shards.size());
    std::vector<at::Tensor> keep;
    std::vector<StoredTensor> tensors;
    for (const Written* tensor : shards[n]) {
      tensors.push_back(saver.stored(*tensor, keep));
      weight_map[tensor->name] = file;
      total += tensor->bytes();
    }
    write_safetensors(folder / file, tensors, {{"format", "pt"}});
  }
  if (shards.size() == 1) return;
  const nlohmann::json index{{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
  write_text(folder / "model.safetensors.index.json", index.dump(2) + "\n");
}

}  // namespace

void save_checkpoint(const Decoder& decoder, const std::filesystem::path& source, const std::filesystem::path& folder,
                     const SaveOptions& options) {
  std::error_code ignored;
  if (std::filesystem::equivalent(source, folder, ignored))
    throw ConfigError(fmt::format("{}: the folder that the model was read from can't be written over", folder.string()));
  const Saver saver(decoder, source);
  write_shards(saver, folder, options.max_shard_bytes);
  write_config(source, folder, decoder.dtype());
  copy_companions(source, folder);
  sync_folder(folder);
}

void mix_into(Decoder& target, const Decoder& source, double alpha) {
  if (target.adapters() != nullptr) throw ConfigError("mix_into: the model to change has adapters: its weights are frozen");
  const auto& to = target.weights();
  const auto& from = source.weights();
  for (size_t i = 0; i < std::max(to.size(), from.size()); ++i) {
    const bool same = i < to.size() && i < from.size() && to[i]->name == from[i]->name && to[i]->shape == from[i]->shape;
    if (same) continue;
    throw ConfigError(fmt::format("mix_into: {}: the two models have other weights", (i < to.size() ? to[i] : from[i])->name));
  }
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < to.size(); ++i) {
    const at::Tensor from_value = merged_value(source, *from[i]);
    if (alpha == 1.0) {
      to[i]->value.copy_(from_value);
      continue;
    }
    const auto wide = device::accumulation_dtype(target.dtype());
    to[i]->value.copy_(from_value.to(to[i]->value.device(), wide) * alpha + to[i]->value.to(wide) * (1.0 - alpha));
  }
}

}  // namespace longstraw::core::model
