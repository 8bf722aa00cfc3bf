// Checkpoints as they are published: parts that are skipped, other prefixes, fused experts, weights in 8-bit floats.
#include "core/base/errors.h"
#include "core/model/block_scaled.h"
#include "core/model/checkpoint.h"
#include "core/model/decoder.h"
#include "core/model/tensor_sources.h"
#include "tests/model/latent_models.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace longstraw::core::model {
namespace {

using nlohmann::json;
using test::tiny_latent_config;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

const std::string kLayer = "model.layers.1.mlp.";

class PublishedLayout : public testing::Test {
 protected:
  void SetUp() override { test::write_checkpoint(path(), config_); }
  const std::filesystem::path& path() const { return folder_.path(); }
  std::filesystem::path file() const { return path() / "model.safetensors"; }
  test::Tensors tensors() const { return test::read_tensors(file()); }
  void write(const test::Tensors& tensors) const { test::write_tensors(file(), tensors); }
  void write_config(const json& changes) {
    config_.merge_patch(changes);
    test::write_json(path() / "config.json", config_);
  }
  std::unique_ptr<Decoder> load(at::ScalarType dtype = at::kFloat) const { return load_decoder(path(), dtype, at::kCPU); }

  static test::Tensors values(const Decoder& decoder) {
    test::Tensors values;
    for (const auto& parameter : decoder.parameters()) values[parameter->name] = parameter->value.detach();
    return values;
  }
  static void expect_equal(const test::Tensors& a, const test::Tensors& b) {
    ASSERT_EQ(a.size(), b.size());
    for (const auto& [name, value] : a) EXPECT_TRUE(at::equal(value, b.at(name))) << name;
  }

  void expect_refused(const std::vector<std::string>& words, const std::vector<std::string>& absent = {}) const {
    try {
      load();
      FAIL() << "was accepted";
    } catch (const FormatError& error) {
      for (const auto& word : words) EXPECT_THAT(error.what(), HasSubstr(word));
      for (const auto& word : absent) EXPECT_THAT(error.what(), Not(HasSubstr(word)));
    }
  }
  // Moves the experts of layer 1 into tensors with all of them.
  void fuse(test::Tensors& all) const {
    std::vector<at::Tensor> inputs, outputs;
    for (int e = 0; e < 8; ++e) {
      const auto take = [&](const std::string& projection) {
        const std::string name = kLayer + "experts." + std::to_string(e) + "." + projection + ".weight";
        at::Tensor value = all.at(name);
        all.erase(name);
        return value;
      };
      const at::Tensor gate = take("gate_proj");
      inputs.push_back(at::cat({gate, take("up_proj")}));
      outputs.push_back(take("down_proj"));
    }
    all[kLayer + "experts.gate_up_proj"] = at::stack(inputs);
    all[kLayer + "experts.down_proj"] = at::stack(outputs);
  }

  json config_ = tiny_latent_config("deepseek_v3");
  test::TemporaryFolder folder_;
};

TEST_F(PublishedLayout, MultiTokenPredictionIsSkippedAndSaidSo) {
  const test::Tensors plain = tensors();
  EXPECT_THAT(load()->notes(), IsEmpty());
  test::Tensors extended = plain;
  extended["model.layers.2.self_attn.q_a_proj.weight"] = at::ones({12, 16});
  extended["model.layers.2.eh_proj.weight"] = at::ones({16, 32});
  write(extended);
  const auto decoder = load();
  EXPECT_THAT(decoder->notes(), ElementsAre("skipped 2 tensors of model.layers.2.*"));
  EXPECT_EQ(decoder->layers(), 2);
  EXPECT_EQ(values(*decoder).size(), plain.size() - 1) << "all but the routing constant";

  extended["model.layers.3.eh_proj.weight"] = at::ones({16, 32});
  extended["model.layers.20.eh_proj.weight"] = at::ones({16, 32});
  extended["model.visual.blocks.0.weight"] = at::ones({2});
  write(extended);
  expect_refused({"3 parameters", "model.layers.3.eh_proj.weight: unexpected", "model.layers.20.eh_proj.weight: unexpected",
                  "model.visual.blocks.0.weight: unexpected"},
                 {"model.layers.2."});
  write_config({{"num_nextn_predict_layers", 0}});
  expect_refused({"5 parameters", "model.layers.2.eh_proj.weight: unexpected"});
}

TEST_F(PublishedLayout, PrefixesAreStrippedOnceAndMustNotMeet) {
  const json config = test::tiny_config();
  test::write_checkpoint(path(), config);
  test::Tensors published{{"model.visual.patch.weight", at::ones({3})}, {"mtp.fc.weight", at::ones({2})}};
  for (const auto& [name, value] : tensors())
    published[name.starts_with("model.") ? "model.language_model." + name.substr(6) : name] = value;
  write(published);
  const CheckpointLayout layout{.prefixes = {{"model.language_model.", "model."}}, .skipped = {"model.visual.", "mtp."}};
  const auto sources = [&] {
    const DecoderParts parts = read_parts(path());
    return find_sources(Checkpoint(path()), parts.builder.parameters, parts.architecture, layout);
  };
  const TensorSources found = sources();
  EXPECT_THAT(found.notes, ElementsAre("skipped 1 tensor of model.visual.*", "skipped 1 tensor of mtp.*"));
  EXPECT_EQ(found.of_parameter.size(), read_parts(path()).builder.parameters.size());

  published["model.norm.weight"] = at::ones({16});
  write(published);
  EXPECT_THAT([&] { sources(); }, testing::Throws<FormatError>(testing::Property(
                                      &FormatError::what, testing::AllOf(HasSubstr("model.norm.weight: the same tensor"),
                                                                         HasSubstr("model.language_model.norm.weight")))));
}

TEST_F(PublishedLayout, FusedExpertsAreTheSameModel) {
  const auto apart = load();
  test::Tensors fused = tensors();
  fuse(fused);
  write(fused);
  const auto together = load();
  expect_equal(values(*apart), values(*together));
  for (const auto& parameter : together->parameters()) EXPECT_TRUE(parameter->value.is_contiguous()) << parameter->name;
  EXPECT_NE(apart->sha256(), together->sha256()) << "the files differ";
}

TEST_F(PublishedLayout, FaultsOfFusedExpertsAreNamedOnce) {
  test::Tensors fused = tensors();
  fuse(fused);
  const auto with = [&](const std::string& name, const at::Tensor& value) {
    test::Tensors changed = fused;
    if (value.defined()) changed[kLayer + name] = value;
    else changed.erase(kLayer + name);
    write(changed);
  };
  with("experts.gate_up_proj", at::ones({8, 6, 16}));
  expect_refused({"1 parameter ", "experts.gate_up_proj: shape [8, 6, 16], wanted [8, 12, 16]"});
  with("experts.down_proj", at::ones({7, 16, 6}));
  expect_refused({"1 parameter ", "experts.down_proj: shape [7, 16, 6], wanted [8, 16, 6]"});
  with("experts.down_proj", at::ones({8, 16, 6}, at::kInt));
  expect_refused({"1 parameter ", "experts.down_proj: dtype I32"});
  with("experts.down_proj", {});
  expect_refused({"8 parameters", "experts.0.down_proj.weight: missing, wanted [16, 6]", "experts.7.down_proj.weight: missing"});
  with("experts.3.down_proj.weight", at::ones({16, 6}));
  expect_refused({"1 parameter ", "experts.3.down_proj.weight: stored twice", "experts.down_proj"});
  at::Tensor broken = fused[kLayer + "experts.gate_up_proj"].clone();
  broken[5][7][2] = std::numeric_limits<float>::infinity();
  with("experts.gate_up_proj", broken);
  expect_refused({"experts.gate_up_proj[5, 6:12]", "element 18 of 96"});
}

TEST_F(PublishedLayout, ATensorOfNoSizeIsNoFault) {
  write_config({{"n_shared_experts", 0}});
  test::Tensors all = tensors();
  for (const char* projection : {"gate_proj", "up_proj", "down_proj"})
    all[kLayer + "shared_experts." + projection + ".weight"] = at::ones({0, 16});
  write(all);
  EXPECT_NO_THROW(load());
}

TEST_F(PublishedLayout, TheRoutingConstantStaysWide) {
  const std::string name = kLayer + "gate.e_score_correction_bias";
  const at::Tensor stored = tensors().at(name);
  for (const auto& [dtype, wide] : {std::pair{at::kBFloat16, at::kFloat}, {at::kFloat, at::kFloat}, {at::kDouble, at::kDouble}}) {
    const auto decoder = load(dtype);
    for (const auto& parameter : decoder->parameters()) EXPECT_NE(parameter->name, name) << "it is not trained";
    ASSERT_EQ(decoder->constants().size(), 1u);
    EXPECT_EQ(decoder->constants()[0]->name, name);
    const at::Tensor kept = decoder->constants()[0]->value;
    EXPECT_EQ(kept.scalar_type(), wide);
    EXPECT_TRUE(at::equal(kept, stored.to(wide)));
    EXPECT_FALSE(kept.requires_grad());
  }
}

}  // namespace
}  // namespace longstraw::core::model
