#include "core/model/adapters.h"

#include "core/base/sha256.h"
#include "core/device/device.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace longstraw::core::model {

namespace {

// Runs that start from other adapters are other runs, as those of other weights are.
std::string with_adapters(const std::string& weights_sha256, const Adapters& adapters) {
  Sha256 hash;
  hash.update(fmt::format("{} lora {} {}\n", weights_sha256, adapters.rank, adapters.alpha));
  for (const Adapter& adapter : adapters.all) {
    for (const auto& part : {adapter.a_rI, adapter.b_Or}) {
      const at::Tensor bytes = part->value.detach().to(at::kCPU).contiguous();
      hash.update(fmt::format("{} {} {}\n", part->name, to_string(part->shape), c10::toString(bytes.scalar_type())));
      hash.update(bytes.const_data_ptr(), bytes.nbytes());
    }
  }
  return hash.hex();
}

}  // namespace

at::Tensor AdaptedExecution::linear(const at::Tensor& x, const Parameter& weight_OI, const Parameter* bias_O) {
  const at::Tensor y = DelegatingExecution::linear(x, weight_OI, bias_O);
  const auto found = adapters_.by_weight.find(&weight_OI);
  if (found == adapters_.by_weight.end()) return y;
  const Adapter& adapter = adapters_.all[found->second];
  const at::Tensor low = DelegatingExecution::linear(x, *adapter.a_rI, nullptr);
  return y + DelegatingExecution::linear(low, *adapter.b_Or, nullptr) * adapters_.scale();
}

void set_adapters(Decoder& decoder, std::unique_ptr<Adapters> adapters, std::vector<std::string> notes) {
  for (const auto& weight : decoder.weights_) weight->value.set_requires_grad(adapters == nullptr);
  decoder.parameters_ = decoder.weights_;
  if (adapters != nullptr) {
    decoder.parameters_.clear();
    for (size_t i = 0; i < adapters->all.size(); ++i) {
      const Adapter& adapter = adapters->all[i];
      adapters->by_weight[adapter.weight.get()] = i;
      for (const auto& part : {adapter.a_rI, adapter.b_Or}) {
        part->value.set_requires_grad(true);
        decoder.parameters_.push_back(part);
      }
    }
    decoder.sha256_ = with_adapters(decoder.sha256_, *adapters);
  }
  decoder.adapters_ = std::move(adapters);
  decoder.notes_.insert(decoder.notes_.end(), notes.begin(), notes.end());
  ++decoder.adaptations_;
}

at::Tensor merged_value(const Decoder& decoder, const Parameter& weight) {
  const Adapters* adapters = decoder.adapters();
  const at::Tensor value = weight.value.detach();
  if (adapters == nullptr || adapters->left_out > 0 || !adapters->by_weight.contains(&weight)) return value;
  const at::NoGradGuard no_grad;
  const Adapter& adapter = adapters->all[adapters->by_weight.at(&weight)];
  const auto wide = device::accumulation_dtype(decoder.dtype());
  const at::Tensor update_OI = at::mm(adapter.b_Or->value.to(wide), adapter.a_rI->value.to(wide)) * adapters->scale();
  return (value.to(wide) + update_OI).to(value.scalar_type());
}

}  // namespace longstraw::core::model
