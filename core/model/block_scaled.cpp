#include "core/model/block_scaled.h"

#include "core/base/errors.h"
#include "core/device/device.h"
#include "core/model/json_reader.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

namespace longstraw::core::model {

namespace {

int64_t blocks_in(int64_t size, int64_t block) { return (size + block - 1) / block; }

void dequantize_matrix(const at::Tensor& stored_OI, const at::Tensor& scales, const ScaleBlocks& blocks, at::Tensor out_OI) {
  const int64_t outputs = stored_OI.size(0), inputs = stored_OI.size(1);
  for (int64_t row = 0; row < outputs; row += blocks.rows) {
    const int64_t rows = std::min(blocks.rows, outputs - row);
    const at::Tensor scale_I = scales.select(0, row / blocks.rows).repeat_interleave(blocks.columns).narrow(0, 0, inputs);
    out_OI.narrow(0, row, rows).copy_(stored_OI.narrow(0, row, rows).to(scales.scalar_type()).mul_(scale_I));
  }
}

}  // namespace

Shape ScaleBlocks::scales_of(const Shape& weight) const {
  Shape scales = weight;
  scales.end()[-2] = blocks_in(weight.end()[-2], rows);
  scales.end()[-1] = blocks_in(weight.end()[-1], columns);
  return scales;
}

std::string ScaleBlocks::to_string() const { return fmt::format("{} x {}", rows, columns); }

ScaleBlocks read_scale_blocks(const JsonReader& config) {
  ScaleBlocks blocks;
  if (!config.has("quantization_config")) return blocks;
  const JsonReader section = config.section("quantization_config");
  constexpr auto kWanted =
      "of quantized checkpoints only fp8 (e4m3) with one scale a block of weights is supported; convert it to bf16, fp16 or fp32";
  if (!section.has("quant_method")) section.refuse("quant_method", "fp8");
  for (const auto& [key, wanted] : {std::pair{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"activation_scheme", "dynamic"}}) {
    if (section.text(key, wanted) != wanted) section.unsupported(key, kWanted);
  }
  if (!section.is_present("weight_block_size")) return blocks;  // the default of transformers
  const auto* size = section.has("weight_block_size") ? &section.json().at("weight_block_size") : nullptr;
  if (size == nullptr) section.unsupported("weight_block_size", kWanted);
  const auto is_size = [](const nlohmann::json& n) { return n.is_number_unsigned() && n > 0 && n <= (int64_t{1} << 32); };
  if (!size->is_array() || size->size() != 2 || !std::all_of(size->begin(), size->end(), is_size))
    section.refuse("weight_block_size", "[rows, columns], whole numbers > 0");
  return {.rows = (*size)[0].get<int64_t>(), .columns = (*size)[1].get<int64_t>()};
}

at::Tensor dequantized(const at::Tensor& stored, const at::Tensor& scales, const ScaleBlocks& blocks, at::ScalarType dtype) {
  const at::Tensor wide_scales = scales.to(device::accumulation_dtype(dtype));
  at::Tensor out = at::empty(stored.sizes(), stored.options().dtype(dtype));
  const auto matrices = [](const at::Tensor& x) { return x.reshape({-1, x.size(-2), x.size(-1)}); };
  const at::Tensor stored_EOI = matrices(stored), scales_E = matrices(wide_scales);
  at::Tensor out_EOI = matrices(out);
  for (int64_t e = 0; e < stored_EOI.size(0); ++e) dequantize_matrix(stored_EOI[e], scales_E[e], blocks, out_EOI[e]);
  return out;
}

}  // namespace longstraw::core::model
