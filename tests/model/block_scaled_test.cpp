// Weights in 8-bit floats with one scale a block: their values element by element, and every fault of a file by name.
#include "core/model/block_scaled.h"

#include "core/base/errors.h"
#include "core/model/decoder.h"
#include "tests/model/latent_models.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>

namespace longstraw::core::model {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

// float8_e4m3fn by its definition: 1 sign, 4 bits of exponent with a bias of 7, 3 of mantissa, no infinity.
double decoded(uint8_t bits) {
  const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}
bool is_nan_code(int bits) { return (bits & 0x7f) == 0x7f; }

// Random codes without the two NaNs.
at::Tensor random_codes(const Shape& shape, int seed) {
  at::manual_seed(uint64_t(seed));
  const at::Tensor codes = at::randint(0, 254, shape, at::kInt);
  return (codes + (codes >= 127).to(at::kInt)).to(at::kByte);
}
at::Tensor as_float8(const at::Tensor& codes) { return codes.contiguous().view(at::kFloat8_e4m3fn); }

// stored · scale, one element at a time in double: both have few digits, so the product is exact.
at::Tensor expected(const at::Tensor& codes_OI, const at::Tensor& scales, const ScaleBlocks& blocks) {
  at::Tensor out = at::empty(codes_OI.sizes(), at::kDouble);
  for (int64_t o = 0; o < codes_OI.size(0); ++o) {
    for (int64_t i = 0; i < codes_OI.size(1); ++i) {
      out[o][i] = decoded(codes_OI[o][i].item<uint8_t>()) * scales[o / blocks.rows][i / blocks.columns].item<double>();
    }
  }
  return out;
}

TEST(BlockScaled, EveryCodeHasItsValue) {
  for (int bits = 0; bits < 256; ++bits) {
    const std::byte byte{uint8_t(bits)};
    const StoredTensor tensor{.name = "w", .dtype = StoredDtype::kF8E4m3, .shape = {1}, .bytes = {&byte, 1}};
    EXPECT_EQ(first_non_finite(tensor), is_nan_code(bits) ? 0 : -1) << bits;
    if (is_nan_code(bits)) continue;
    const at::Tensor code = at::full({1, 1}, bits, at::kByte);
    EXPECT_EQ(dequantized(as_float8(code), at::ones({1, 1}), {}, at::kDouble).item<double>(), decoded(uint8_t(bits))) << bits;
  }
}

TEST(BlockScaled, RaggedBlocksTakeTheirOwnScale) {
  for (const auto& [shape, blocks] : {std::pair{Shape{7, 11}, ScaleBlocks{4, 8}},
                                      {Shape{8, 16}, ScaleBlocks{4, 8}},
                                      {Shape{3, 5}, ScaleBlocks{128, 128}},
                                      {Shape{130, 257}, ScaleBlocks{128, 128}}}) {
    const at::Tensor codes = random_codes(shape, 1);
    const at::Tensor scales = at::rand(blocks.scales_of(shape), at::kFloat) + 0.5;
    EXPECT_EQ(blocks.scales_of(shape)[0], (shape[0] + blocks.rows - 1) / blocks.rows);
    const at::Tensor exact = expected(codes, scales, blocks);
    EXPECT_TRUE(at::equal(dequantized(as_float8(codes), scales, blocks, at::kDouble), exact)) << "the product is exact";
    EXPECT_TRUE(at::equal(dequantized(as_float8(codes), scales, blocks, at::kFloat), exact.to(at::kFloat)));
    EXPECT_TRUE(at::equal(dequantized(as_float8(codes), scales, blocks, at::kBFloat16), exact.to(at::kFloat).to(at::kBFloat16)));
  }
  const at::Tensor codes = random_codes({2, 5, 9}, 2), scales = at::rand({2, 2, 3}) + 0.5;
  const at::Tensor both = dequantized(as_float8(codes), scales, {4, 4}, at::kDouble);
  for (int e = 0; e < 2; ++e) EXPECT_TRUE(at::equal(both[e], expected(codes[e], scales[e], {4, 4}))) << "all experts in one";
}

// A checkpoint whose projections are stored so, with ragged blocks of 4 x 8.
class Float8Checkpoint : public testing::Test {
 protected:
  void SetUp() override {
    const json config = test::tiny_latent_config(
        "deepseek_v3",
        {{"quantization_config",
          {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"activation_scheme", "dynamic"}, {"weight_block_size", {4, 8}}}}});
    test::write_checkpoint(path(), config);
    stored_ = test::read_tensors(file());
    int seed = 0;
    for (auto& [name, value] : stored_) {
      if (!name.ends_with("proj.weight")) continue;
      codes_[name] = random_codes(value.sizes().vec(), ++seed);
      scales_[name] = at::rand(kBlocks.scales_of(value.sizes().vec()), at::kFloat) * 0.01 + 0.01;
    }
    for (const auto& [name, codes] : codes_) {
      stored_[name] = as_float8(codes);
      stored_[name + "_scale_inv"] = scales_[name];
    }
    write(stored_);
  }

  const std::filesystem::path& path() const { return folder_.path(); }
  std::filesystem::path file() const { return path() / "model.safetensors"; }
  void write(const test::Tensors& tensors) const { test::write_tensors(file(), tensors); }
  void expect_refused(const std::vector<std::string>& words) const {
    try {
      load_decoder(path(), at::kFloat, at::kCPU);
      FAIL() << "was accepted";
    } catch (const FormatError& error) {
      EXPECT_THAT(error.what(), HasSubstr(path().string()));
      for (const auto& word : words) EXPECT_THAT(error.what(), HasSubstr(word));
    }
  }
  void expect_refused_with(const std::string& name, const at::Tensor& value, const std::vector<std::string>& words) const {
    test::Tensors changed = stored_;
    if (value.defined()) changed[name] = value;
    else changed.erase(name);
    write(changed);
    expect_refused(words);
  }

  static constexpr ScaleBlocks kBlocks{4, 8};
  const std::string kQuery = "model.layers.0.self_attn.q_a_proj.weight";  // [12, 16]
  test::Tensors stored_, codes_, scales_;
  test::TemporaryFolder folder_;
};

TEST_F(Float8Checkpoint, IsDequantizedOnLoad) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const auto decoder = load_decoder(path(), dtype, at::kCPU);
    size_t seen = 0;
    for (const auto& parameter : decoder->parameters()) {
      EXPECT_EQ(parameter->value.scalar_type(), dtype);
      if (!codes_.contains(parameter->name)) continue;
      ++seen;
      const at::Tensor exact = expected(codes_[parameter->name], scales_[parameter->name], kBlocks);
      const at::Tensor wanted = dtype == at::kDouble ? exact : exact.to(at::kFloat).to(dtype);
      EXPECT_TRUE(at::equal(parameter->value, wanted)) << parameter->name;
    }
    EXPECT_EQ(seen, codes_.size());
    EXPECT_GT(seen, 20u);
    EXPECT_THAT(decoder->notes(), ElementsAre(fmt::format("dequantized {} float8 tensors, one scale a block of 4 x 8", seen)));
  }
}

TEST_F(Float8Checkpoint, ExpertsMayBeFusedToo) {
  const auto apart = load_decoder(path(), at::kDouble, at::kCPU);
  // 6 rows of a gate and 6 of an up projection: the second block of 4 rows holds some of both.
  const std::string prefix = "model.layers.1.mlp.experts.";
  test::Tensors fused = stored_;
  const auto each = [&](int e, const char* projection) { return prefix + std::to_string(e) + "." + projection + "_proj.weight"; };
  for (const auto& [name, value] : stored_) {
    if (name.starts_with(prefix)) fused.erase(name);
  }
  const at::Tensor input_codes = random_codes({8, 12, 16}, 77), input_scales = at::rand({8, 3, 2}) + 0.5;
  std::vector<at::Tensor> outputs, output_scales;
  for (int e = 0; e < 8; ++e) {
    outputs.push_back(codes_[each(e, "down")]);
    output_scales.push_back(scales_[each(e, "down")]);
  }
  fused[prefix + "gate_up_proj"] = as_float8(input_codes);
  fused[prefix + "gate_up_proj_scale_inv"] = input_scales;
  fused[prefix + "down_proj"] = as_float8(at::stack(outputs));
  fused[prefix + "down_proj_scale_inv"] = at::stack(output_scales);
  write(fused);
  const auto together = load_decoder(path(), at::kDouble, at::kCPU);
  std::map<std::string, at::Tensor> values;
  for (const auto& parameter : together->parameters()) values[parameter->name] = parameter->value;
  for (const auto& parameter : apart->parameters()) {
    if (parameter->name.ends_with("gate_proj.weight") || parameter->name.ends_with("up_proj.weight")) continue;
    EXPECT_TRUE(at::equal(values.at(parameter->name), parameter->value)) << parameter->name;
  }
  for (int e = 0; e < 8; ++e) {
    const at::Tensor whole = expected(input_codes[e], input_scales[e], kBlocks);
    EXPECT_TRUE(at::equal(values.at(each(e, "gate")), whole.narrow(0, 0, 6)));
    EXPECT_TRUE(at::equal(values.at(each(e, "up")), whole.narrow(0, 6, 6)));
  }
}

TEST_F(Float8Checkpoint, FaultsOfScalesAreNamed) {
  const std::string scale = kQuery + "_scale_inv";
  expect_refused_with(scale, {}, {"1 parameter ", scale + ": missing, wanted [3, 2]", "F8_E4M3"});
  expect_refused_with(scale, at::ones({2, 3}), {"1 parameter ", scale + ": shape [2, 3], wanted [3, 2]", "4 x 8"});
  expect_refused_with(scale, at::ones({1, 1}), {scale + ": shape [1, 1], wanted [3, 2]"});
  expect_refused_with(scale, at::ones({3, 2}, at::kInt), {scale + ": dtype I32"});
  expect_refused_with(scale, as_float8(random_codes({3, 2}, 1)), {scale + ": dtype F8_E4M3"});
  at::Tensor bad = at::ones({3, 2});
  bad[1][1] = std::numeric_limits<float>::quiet_NaN();
  expect_refused_with(scale, bad, {"model.safetensors", scale, "element 3 of 6"});
  bad[1][1] = std::ldexp(1.0f, 120);  // times 448: beyond bfloat16 and float32
  expect_refused_with(scale, bad, {"model.safetensors", scale, "1.329227995784916e+36"});
  // Wide weights have no scales, and scales belong to a weight.
  expect_refused_with(kQuery, at::ones({12, 16}), {"1 parameter ", scale + ": unexpected"});
  expect_refused_with("model.layers.0.self_attn.r_proj.weight_scale_inv", at::ones({1}), {"r_proj.weight_scale_inv: unexpected"});
}

TEST_F(Float8Checkpoint, FaultsOfWeightsAreNamed) {
  for (const int code : {0x7f, 0xff}) {
    at::Tensor codes = codes_[kQuery].clone();
    codes[2][5] = code;
    expect_refused_with(kQuery, as_float8(codes), {"model.safetensors", kQuery, "element 37 of 192"});
  }
  expect_refused_with("model.norm.weight", as_float8(random_codes({16}, 3)), {"model.norm.weight: dtype F8_E4M3", "matrices"});
  expect_refused_with(kQuery, as_float8(random_codes({12, 15}, 3)), {kQuery + ": shape [12, 15], wanted [12, 16]"});
  write(stored_);
  std::filesystem::resize_file(file(), std::filesystem::file_size(file()) - 1);
  expect_refused({"model.safetensors", "truncated"});
}

}  // namespace
}  // namespace longstraw::core::model
