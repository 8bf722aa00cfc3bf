#pragma once
// Low-rank adapters inside a decoder: what lora.h puts there, and how they take part in its computation.

#include "core/model/decoder.h"
#include "core/model/delegating_execution.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace longstraw::core::model {

struct Adapter {
  std::shared_ptr<Parameter> weight;  // the frozen one, [O, I]
  std::string module;                 // as Hugging Face's class calls it: "model.layers.0.self_attn.q_proj"
  std::shared_ptr<Parameter> a_rI;
  std::shared_ptr<Parameter> b_Or;
};

struct Adapters {
  int64_t rank = 0;
  double alpha = 1.0;
  std::vector<std::string> target_modules;  // as they were asked for
  std::vector<Adapter> all = {};            // in the order of the layers
  std::unordered_map<const Parameter*, size_t> by_weight = {};
  mutable int left_out = 0;  // how many WithoutAdapters live

  double scale() const { return alpha / static_cast<double>(rank); }
};

// y = x Wᵀ (+ b) + scale · (x Aᵀ) Bᵀ where W has an adapter.
class AdaptedExecution final : public DelegatingExecution {
 public:
  AdaptedExecution(Execution& execution, const Adapters& adapters) : DelegatingExecution(execution), adapters_(adapters) {}
  at::Tensor linear(const at::Tensor& x, const Parameter& weight_OI, const Parameter* bias_O) override;

 private:
  const Adapters& adapters_;
};

// Freezes the decoder's weights and makes the adapters its parameters; null: takes the adapters away, all weights are trained
// again. The notes are added to the decoder's.
void set_adapters(Decoder& decoder, std::unique_ptr<Adapters> adapters, std::vector<std::string> notes = {});

// The weight that the decoder computes with: W + scale · B A, in the decoder's dtype, where it has an adapter that is not left out;
// its value where not.
at::Tensor merged_value(const Decoder& decoder, const Parameter& weight);

}  // namespace longstraw::core::model
