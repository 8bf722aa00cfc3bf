#pragma once
// Where in a checkpoint's files each parameter of a decoder lies. Published files differ from the model's own names:
// parts that we don't run beside it (a vision tower, multi-token prediction), another prefix, all experts of a layer in one
// tensor, 8-bit weights with scales.

#include "core/model/architecture.h"
#include "core/model/checkpoint.h"
#include "core/model/execution.h"
#include "core/model/registry.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace longstraw::core::model {

struct TensorSource {
  Checkpoint::Entry stored;
  std::optional<Checkpoint::Entry> scales = {};  // of a weight in 8-bit floats
  std::optional<int64_t> expert = {};            // index into the first dimension of a tensor with all experts
  int64_t first_row = 0;                         // of that expert's matrix
};

struct TensorSources {
  std::vector<TensorSource> of_parameter;        // in the order of the parameters
  std::optional<Checkpoint::Entry> output_copy;  // a stored lm_head.weight of a model whose embeddings are tied
  std::vector<std::string> notes;                // what a user should know: tensors left out, weights dequantized
};

// The parameters' names are those of a checkpoint with one tensor a projection and expert; all experts in one tensor are
//   experts.gate_up_proj [E, 2I, D], gate rows first (experts.up_proj [E, I, D] without a gate), experts.down_proj [E, D, I].
// Throws FormatError with all faults at once: missing and unexpected tensors, wrong shapes and dtypes, both layouts of the
// same experts, scales that are missing or do not fit, two tensors that get the same name.
TensorSources find_sources(const Checkpoint& checkpoint, const std::vector<std::shared_ptr<Parameter>>& parameters,
                           const Architecture& architecture, const CheckpointLayout& layout);

// The parameter's value on the CPU, in `dtype`. Throws FormatError naming file and tensor for a value that is not finite.
at::Tensor read_source(const TensorSource& source, const Parameter& parameter, const ScaleBlocks& blocks, at::ScalarType dtype);

}  // namespace longstraw::core::model
