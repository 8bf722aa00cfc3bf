#include "core/model/tensor_sources.h"

#include "core/base/errors.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

namespace longstraw::core::model {

namespace {

using Entry = Checkpoint::Entry;
using Parameters = std::vector<std::shared_ptr<Parameter>>;

// The checkpoint's tensors by the names that the model has for them.
struct Named {
  std::map<std::string, Entry> tensors;
  std::vector<std::string> notes;
};

std::string renamed(const std::string& name, const CheckpointLayout& layout) {
  for (const auto& [from, to] : layout.prefixes) {
    if (name.starts_with(from)) return to + name.substr(from.size());
  }
  return name;
}

Named apply_layout(const Checkpoint& checkpoint, const CheckpointLayout& layout, std::vector<std::string>& faults) {
  Named named;
  std::map<std::string, int64_t> skipped;
  std::map<std::string, std::string> stored_names;
  for (const auto& [stored, entry] : checkpoint.tensors()) {
    const std::string name = renamed(stored, layout);
    const auto prefix = std::find_if(layout.skipped.begin(), layout.skipped.end(),
                                     [&](const auto& p) { return stored.starts_with(p) || name.starts_with(p); });
    if (prefix != layout.skipped.end()) {
      skipped[*prefix] += 1;
      continue;
    }
    if (!named.tensors.emplace(name, entry).second)
      faults.push_back(fmt::format("{}: the same tensor of the model as {}", stored, stored_names[name]));
    stored_names.emplace(name, stored);
  }
  for (const auto& [prefix, count] : skipped)
    named.notes.push_back(fmt::format("skipped {} tensor{} of {}*", count, count == 1 ? "" : "s", prefix));
  return named;
}

// One projection of one expert: where it is in a tensor with all of them.
struct FusedPart {
  std::string name;
  int64_t expert = 0;
  int64_t first_row = 0;
};

// Tensors with all experts that a file may have in place of the parameters', with the shapes they should have.
class FusedLayout {
 public:
  explicit FusedLayout(const Parameters& parameters) {
    for (const auto& parameter : parameters) names_.insert(parameter->name);
    for (const auto& parameter : parameters) {
      if (const auto part = part_of(*parameter)) {
        Shape& shape = shapes_[part->name];
        const int64_t rows = part->first_row + parameter->shape[0];
        if (shape.empty()) shape = {0, 0, parameter->shape[1]};
        shape[0] = std::max(shape[0], part->expert + 1);
        shape[1] = std::max(shape[1], rows);
      }
    }
  }

  const std::map<std::string, Shape>& shapes() const { return shapes_; }

  // Nothing for a parameter that is no expert's projection.
  std::optional<FusedPart> part_of(const Parameter& parameter) const {
    constexpr std::string_view kExperts = "experts.";
    const std::string& name = parameter.name;
    const size_t at = name.rfind(std::string(".") + std::string(kExperts));
    if (at == std::string::npos || parameter.shape.size() != 2) return std::nullopt;
    const size_t begin = at + 1 + kExperts.size(), end = name.find('.', begin);
    if (end == std::string::npos || end == begin || end - begin > 9) return std::nullopt;
    if (!std::all_of(name.begin() + long(begin), name.begin() + long(end), [](char c) { return c >= '0' && c <= '9'; }))
      return std::nullopt;
    const std::string before = name.substr(0, begin), one = name.substr(0, end + 1), projection = name.substr(end + 1);
    const int64_t expert = std::stoll(name.substr(begin, end - begin));
    const bool gated = names_.contains(one + "gate_proj.weight");
    if (projection == "down_proj.weight") return FusedPart{before + "down_proj", expert};
    if (projection == "gate_proj.weight") return FusedPart{before + "gate_up_proj", expert};
    if (projection != "up_proj.weight") return std::nullopt;
    return gated ? FusedPart{before + "gate_up_proj", expert, parameter.shape[0]} : FusedPart{before + "up_proj", expert};
  }

 private:
  std::set<std::string> names_;
  std::map<std::string, Shape> shapes_;
};

// Tensors that some checkpoints carry and that follow from the rest: the table of rotary frequencies that old versions
// stored, and what a part of no size leaves.
bool is_redundant(const std::string& name, const Entry& entry) {
  return name.ends_with(".rotary_emb.inv_freq") || element_count(entry.tensor->shape) == 0;
}

class SourceFinder {
 public:
  SourceFinder(const Checkpoint& checkpoint, const Parameters& parameters, const Architecture& architecture,
               const CheckpointLayout& layout)
      : checkpoint_(checkpoint), parameters_(parameters), architecture_(architecture), fused_(parameters) {
    named_ = apply_layout(checkpoint, layout, faults_);
  }

  TensorSources find() {
    TensorSources sources;
    for (const auto& parameter : parameters_) {
      if (auto source = source_of(*parameter)) sources.of_parameter.push_back(std::move(*source));
    }
    if (architecture_.tied_embeddings) sources.output_copy = use("lm_head.weight");
    for (const auto& [name, entry] : named_.tensors) {
      if (!used_.contains(name) && !is_redundant(name, entry))
        faults_.push_back(fmt::format("{}: unexpected in a {} model of this config.json", name, architecture_.model_type));
    }
    throw_faults();
    sources.notes = std::move(named_.notes);
    if (scaled_ > 0) {
      sources.notes.push_back(
          fmt::format("dequantized {} float8 tensors, one scale a block of {}", scaled_, architecture_.scale_blocks.to_string()));
    }
    return sources;
  }

 private:
  std::optional<Entry> use(const std::string& name) {
    const auto found = named_.tensors.find(name);
    if (found == named_.tensors.end()) return std::nullopt;
    used_.insert(name);
    return found->second;
  }

  std::optional<TensorSource> source_of(const Parameter& parameter) {
    const auto part = fused_.part_of(parameter);
    const auto own = use(parameter.name);
    if (part && named_.tensors.contains(part->name)) {
      if (own) {
        used_.insert(part->name);
        faults_.push_back(fmt::format("{}: stored twice, also as a part of {}", parameter.name, part->name));
        return std::nullopt;
      }
      return checked(part->name, fused_.shapes().at(part->name),
                     TensorSource{.stored = *use(part->name), .expert = part->expert, .first_row = part->first_row});
    }
    if (own) return checked(parameter.name, parameter.shape, TensorSource{.stored = *own});
    faults_.push_back(fmt::format("{}: missing, wanted {}", parameter.name, to_string(parameter.shape)));
    return std::nullopt;
  }

  // The faults of a tensor with all experts are told once.
  std::optional<TensorSource> checked(const std::string& name, const Shape& shape, TensorSource source) {
    const auto [known, is_new] = checked_.try_emplace(name);
    if (is_new) known->second = check(name, shape, *source.stored.tensor);
    if (!known->second.ok) return std::nullopt;
    source.scales = known->second.scales;
    return source;
  }

  struct Checked {
    bool ok = false;
    std::optional<Entry> scales;
  };
  Checked check(const std::string& name, const Shape& shape, const StoredTensor& tensor) {
    const size_t before = faults_.size();
    if (tensor.shape != shape)
      faults_.push_back(fmt::format("{}: shape {}, wanted {}", name, to_string(tensor.shape), to_string(shape)));
    if (!is_floating(tensor.dtype))
      faults_.push_back(fmt::format("{}: dtype {}, wanted a floating-point one", name, name_of(tensor.dtype)));
    Checked result;
    if (tensor.dtype == StoredDtype::kF8E4m3) result.scales = scales_of(name, shape);
    result.ok = faults_.size() == before;
    return result;
  }

  std::optional<Entry> scales_of(const std::string& name, const Shape& shape) {
    const std::string scale_name = name + std::string(kScaleSuffix);
    if (shape.size() < 2) {
      faults_.push_back(fmt::format("{}: dtype F8_E4M3, wanted a wider one: only matrices have scales", name));
      return std::nullopt;
    }
    const Shape wanted = architecture_.scale_blocks.scales_of(shape);
    const auto scales = use(scale_name);
    if (!scales) {
      faults_.push_back(fmt::format("{}: missing, wanted {}: scales of {}, which is F8_E4M3", scale_name, to_string(wanted), name));
      return std::nullopt;
    }
    const StoredTensor& tensor = *scales->tensor;
    if (tensor.shape != wanted) {
      faults_.push_back(fmt::format("{}: shape {}, wanted {}: one scale a block of {} of {}", scale_name, to_string(tensor.shape),
                                    to_string(wanted), architecture_.scale_blocks.to_string(), to_string(shape)));
    }
    if (!is_floating(tensor.dtype) || tensor.dtype == StoredDtype::kF8E4m3)
      faults_.push_back(fmt::format("{}: dtype {}, wanted F32, BF16, F16 or F64", scale_name, name_of(tensor.dtype)));
    ++scaled_;
    return scales;
  }

  // All faults at once: a checkpoint of another model differs in many names, and the list says which model it is.
  void throw_faults() const {
    if (faults_.empty()) return;
    const bool one = faults_.size() == 1;
    throw FormatError(fmt::format("{}: {} parameter{} do{} not fit config.json:\n  {}", checkpoint_.folder().string(),
                                  faults_.size(), one ? "" : "s", one ? "es" : "", fmt::join(faults_, "\n  ")));
  }

  const Checkpoint& checkpoint_;
  const Parameters& parameters_;
  const Architecture& architecture_;
  FusedLayout fused_;
  std::vector<std::string> faults_;
  Named named_;
  std::set<std::string> used_;
  std::map<std::string, Checked> checked_;
  int64_t scaled_ = 0;
};

// `rows` rows of a matrix, which may be one of several in a tensor. As a tensor of its own, so that a message about a value
// counts from its first.
StoredTensor rows_of(const StoredTensor& tensor, std::optional<int64_t> matrix, int64_t first_row, int64_t rows) {
  if (!matrix) return tensor;
  const int64_t columns = tensor.shape.back(), all_rows = tensor.shape.end()[-2];
  const int64_t row_bytes = columns * bytes_per_element(tensor.dtype);
  const int64_t begin = (*matrix * all_rows + first_row) * row_bytes;
  return {.name = fmt::format("{}[{}, {}:{}]", tensor.name, *matrix, first_row, first_row + rows),
          .dtype = tensor.dtype,
          .shape = {rows, columns},
          .bytes = tensor.bytes.subspan(size_t(begin), size_t(rows * row_bytes))};
}

StoredTensor matrix_of(const StoredTensor& tensor, std::optional<int64_t> matrix) {
  return matrix ? rows_of(tensor, matrix, 0, tensor.shape.end()[-2]) : tensor;
}

at::Tensor read_scaled(const TensorSource& source, const ScaleBlocks& blocks, at::ScalarType dtype) {
  const auto& [file, tensor] = source.stored;
  const at::Tensor scales = read_tensor(*source.scales->file, matrix_of(*source.scales->tensor, source.expert));
  // The largest 8-bit value is 448; the product must be a number in every dtype of a run, bfloat16 included.
  constexpr double kLargest = 0x1.fep127;
  const double largest = scales.numel() == 0 ? 0.0 : scales.to(at::kDouble).abs().max().item<double>() * 448.0;
  if (largest > kLargest) {
    throw FormatError(fmt::format("{}: tensor {}: a scale of {}, which makes weights that are not finite numbers",
                                  source.scales->file->path().string(), source.scales->tensor->name, largest / 448.0));
  }
  return dequantized(read_tensor(*file, matrix_of(*tensor, source.expert)), scales, blocks, dtype);
}

}  // namespace

TensorSources find_sources(const Checkpoint& checkpoint, const Parameters& parameters, const Architecture& architecture,
                           const CheckpointLayout& layout) {
  return SourceFinder(checkpoint, parameters, architecture, layout).find();
}

at::Tensor read_source(const TensorSource& source, const Parameter& parameter, const ScaleBlocks& blocks, at::ScalarType dtype) {
  const int64_t rows = source.expert ? parameter.shape[0] : 0;
  if (source.scales) {
    const at::Tensor whole = read_scaled(source, blocks, dtype);
    return source.expert ? whole.narrow(0, source.first_row, rows).clone() : whole;
  }
  return read_tensor(*source.stored.file, rows_of(*source.stored.tensor, source.expert, source.first_row, rows)).to(dtype);
}

}  // namespace longstraw::core::model
