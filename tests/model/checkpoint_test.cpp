// Folders: one file or shards, what fits config.json and what does not, the hash, the description.
#include "core/model/checkpoint.h"

#include "core/base/errors.h"
#include "core/model/decoder.h"
#include "core/model/describe.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace longstraw::core::model {
namespace {

using nlohmann::json;
using test::tiny_config;
using testing::HasSubstr;

class CheckpointFolder : public testing::Test {
 protected:
  void SetUp() override { test::write_checkpoint(path(), tiny_config()); }
  const std::filesystem::path& path() const { return folder_.path(); }
  std::filesystem::path file() const { return path() / "model.safetensors"; }
  test::Tensors tensors() const { return test::read_tensors(file()); }

  // Moves the tensors into two shards and writes their index; `weight_map` as the index says it.
  json shard() {
    const auto all = tensors();
    std::map<std::string, test::Tensors> shards;
    json weight_map;
    for (const auto& [name, tensor] : all) {
      const std::string shard =
          name.find("layers.0") != std::string::npos ? "model-00001-of-00002.safetensors" : "model-00002-of-00002.safetensors";
      shards[shard][name] = tensor;
      weight_map[name] = shard;
    }
    for (const auto& [shard, part] : shards) test::write_tensors(path() / shard, part);
    std::filesystem::remove(file());
    write_index(weight_map);
    return weight_map;
  }
  void write_index(const json& weight_map) {
    test::write_json(path() / "model.safetensors.index.json", {{"weight_map", weight_map}});
  }

  template <class E = FormatError>
  void expect_refused(const std::vector<std::string>& words) {
    try {
      load_decoder(path(), at::kFloat, at::kCPU);
      FAIL() << "was accepted";
    } catch (const E& error) {
      for (const auto& word : words) EXPECT_THAT(error.what(), HasSubstr(word));
    }
  }
  test::TemporaryFolder folder_;
};

TEST_F(CheckpointFolder, ParametersHaveTheNamesAndValuesOfTheFile) {
  const auto decoder = load_decoder(path(), at::kDouble, at::kCPU);
  const auto stored = tensors();
  ASSERT_EQ(decoder->parameters().size(), stored.size());
  for (const auto& parameter : decoder->parameters()) {
    EXPECT_TRUE(at::equal(parameter->value, stored.at(parameter->name).to(at::kDouble))) << parameter->name;
    EXPECT_TRUE(parameter->value.requires_grad() && parameter->value.is_leaf());
  }
  EXPECT_EQ(decoder->parameters().front()->name, "model.embed_tokens.weight");
  EXPECT_EQ(decoder->output_weight().name, "lm_head.weight");
}

TEST_F(CheckpointFolder, ShardsReadLikeOneFileAndHashTheSame) {
  const auto one = load_decoder(path(), at::kFloat, at::kCPU);
  shard();
  const auto sharded = load_decoder(path(), at::kFloat, at::kCPU);
  for (size_t i = 0; i < one->parameters().size(); ++i)
    EXPECT_TRUE(at::equal(one->parameters()[i]->value, sharded->parameters()[i]->value));
  EXPECT_EQ(one->sha256(), sharded->sha256());
  EXPECT_EQ(one->sha256().size(), 64u);
}

TEST_F(CheckpointFolder, TheHashSeesOneBitAndOneName) {
  const std::string before = Checkpoint(path()).sha256();
  auto changed = tensors();
  changed["model.norm.weight"][3] += 1e-6;
  test::write_tensors(file(), changed);
  const std::string one_bit = Checkpoint(path()).sha256();
  EXPECT_NE(before, one_bit);
  auto renamed = tensors();
  renamed["model.norm.weighs"] = renamed["model.norm.weight"];
  renamed.erase("model.norm.weight");
  test::write_tensors(file(), renamed);
  EXPECT_NE(Checkpoint(path()).sha256(), one_bit);
}

TEST_F(CheckpointFolder, FaultyShardsAreNamed) {
  const json weight_map = shard();
  json changed = weight_map;
  changed["model.extra.weight"] = "model-00001-of-00002.safetensors";
  write_index(changed);
  expect_refused({"model-00001-of-00002.safetensors", "model.extra.weight"});
  changed = weight_map;
  changed["model.norm.weight"] = "model-00001-of-00002.safetensors";
  write_index(changed);
  expect_refused({"model-00001-of-00002.safetensors", "model.norm.weight"});
  changed = weight_map;
  changed.erase("model.norm.weight");
  write_index(changed);
  expect_refused({"model-00002-of-00002.safetensors", "model.norm.weight", "not in"});
  changed["model.norm.weight"] = "../model.safetensors";
  write_index(changed);
  expect_refused({"model.norm.weight", "same folder"});
  write_index(weight_map);
  std::filesystem::remove(path() / "model-00002-of-00002.safetensors");
  expect_refused({"index.json", "model-00002-of-00002.safetensors", "not there"});
}

TEST_F(CheckpointFolder, AllMisfitsAreReportedAtOnce) {
  auto changed = tensors();
  changed.erase("model.layers.1.mlp.up_proj.weight");
  changed["model.layers.0.self_attn.q_proj.bias"] = at::zeros({16});
  changed["model.norm.weight"] = at::zeros({15});
  test::write_tensors(file(), changed);
  expect_refused({"3 parameters", "model.layers.1.mlp.up_proj.weight: missing, wanted [24, 16]", "q_proj.bias: unexpected",
                  "model.norm.weight: shape [15], wanted [16]"});
}

TEST_F(CheckpointFolder, WhatFollowsFromTheRestMayBeThere) {
  auto extended = tensors();
  extended["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::ones({2});
  test::write_tensors(file(), extended);
  EXPECT_NO_THROW(load_decoder(path(), at::kFloat, at::kCPU));

  test::write_json(path() / "config.json", tiny_config({{"tie_word_embeddings", true}}));
  expect_refused({"lm_head.weight", "tie_word_embeddings"});  // it differs from the embedding
  extended["lm_head.weight"] = extended["model.embed_tokens.weight"];
  test::write_tensors(file(), extended);
  const auto decoder = load_decoder(path(), at::kFloat, at::kCPU);
  EXPECT_EQ(decoder->output_weight().name, "model.embed_tokens.weight");
  for (const auto& parameter : decoder->parameters()) EXPECT_NE(parameter->name, "lm_head.weight");
}

TEST_F(CheckpointFolder, AValueThatIsNotFiniteIsNamed) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
    auto changed = tensors();
    changed["model.layers.1.mlp.down_proj.weight"] = changed["model.layers.1.mlp.down_proj.weight"].to(at::kBFloat16);
    changed["model.layers.1.mlp.down_proj.weight"][2][5] = bad;
    test::write_tensors(file(), changed);
    expect_refused({"model.safetensors", "model.layers.1.mlp.down_proj.weight", "element 53"});
    test::write_checkpoint(path(), tiny_config());
  }
}

TEST_F(CheckpointFolder, MissingFilesAreNamed) {
  std::filesystem::remove(file());
  expect_refused({path().string(), "model.safetensors"});
  EXPECT_THROW(load_decoder(path() / "nowhere", at::kFloat, at::kCPU), FormatError);
}

TEST_F(CheckpointFolder, IntegersAreNoWeights) {
  auto changed = tensors();
  changed["model.norm.weight"] = at::ones({16}, at::kLong);
  test::write_tensors(file(), changed);
  expect_refused({"model.norm.weight", "I64"});
}

TEST_F(CheckpointFolder, DescribesWithoutReadingWeights) {
  auto changed = tensors();
  changed["model.norm.weight"][0] = std::numeric_limits<float>::quiet_NaN();
  test::write_tensors(file(), changed);  // a description does not look at values
  const json description = describe(path());
  int64_t parameters = 0;
  for (const auto& [name, tensor] : changed) parameters += tensor.numel();
  EXPECT_EQ(description["parameters"], parameters);
  EXPECT_EQ(description["elements_by_dtype"]["F32"], parameters);
  EXPECT_EQ(description["architecture"]["model_type"], "llama");
  EXPECT_EQ(description["files"][0]["name"], "model.safetensors");
  EXPECT_EQ(description["files"][0]["bytes"], std::filesystem::file_size(file()));
  // 2 layers × key and value × 2 heads × 4 numbers × 4 bytes
  EXPECT_EQ(description["state_bytes_per_token"], 2 * 2 * 2 * 4 * 4);
  EXPECT_EQ(description["layer_kinds"][0]["layers"], 2);
}

}  // namespace
}  // namespace longstraw::core::model
