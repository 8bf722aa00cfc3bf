// config.json of models with latent attention: defaults, refusals, and the published models.
#include "core/base/errors.h"
#include "core/model/families/deepseek/config.h"
#include "core/model/families/deepseek/deepseek.h"
#include "core/model/registry.h"
#include "tests/model/latent_models.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace longstraw::core::model {
namespace {

using nlohmann::json;
using test::tiny_latent_config;
using testing::ElementsAre;
using testing::HasSubstr;

DecoderParts read(const json& config) {
  const test::TemporaryFolder folder;
  test::write_json(folder.path() / "config.json", config);
  return read_parts(folder.path());
}

deepseek::Config read_config(const json& config) {
  const JsonReader reader("config.json", config);
  const std::string type = config.at("model_type");
  if (type == "deepseek_v3") return deepseek::read_deepseek_v3(reader);
  return type == "deepseek_v32" ? deepseek::read_deepseek_v32(reader) : deepseek::read_glm_moe_dsa(reader);
}

void expect_refused(const json& config, const std::vector<std::string>& words) {
  try {
    read(config);
    FAIL() << "was accepted: " << config.dump();
  } catch (const FormatError& error) {
    EXPECT_THAT(error.what(), HasSubstr("config.json"));
    for (const auto& word : words) EXPECT_THAT(error.what(), HasSubstr(word));
  }
}

json without(json config, const std::vector<std::string>& keys) {
  for (const auto& key : keys) config.erase(key);
  return config;
}

int64_t parameter_count(const DecoderParts& parts) {
  int64_t count = 0;
  for (const auto& parameter : parts.builder.parameters) count += element_count(parameter->shape);
  return count;
}

int64_t state_numbers_per_token(const DecoderParts& parts) {
  int64_t numbers = 0;
  for (const MixerState& state : parts.builder.states) {
    EXPECT_TRUE(state.carried.empty());
    for (const TokenRows& rows : state.rows) numbers += rows.heads * rows.width;
  }
  return numbers;
}

std::vector<int64_t> layers_of(const DecoderParts& parts, const std::string& kind) {
  std::vector<int64_t> layers;
  for (const MixerState& state : parts.builder.states) {
    if (state.kind == kind) layers.push_back(state.layer);
  }
  return layers;
}

constexpr int64_t kBfloat16 = 2;

TEST(DeepseekConfig, DeepseekV3AsPublished) {
  const DecoderParts parts = read(test::published_deepseek_v3());
  EXPECT_NEAR(double(parameter_count(parts)), 671e9, 0.5e9) << "the model card: 671B";
  EXPECT_EQ(state_numbers_per_token(parts) * kBfloat16, 61 * (512 + 64) * kBfloat16);
  EXPECT_EQ(layers_of(parts, "latent attention").size(), 61u);
  EXPECT_EQ(parts.builder.routers.size(), 58u);
  EXPECT_EQ(parts.builder.routers.front().layer, 3);
  EXPECT_EQ(parts.architecture.rotary.dims, 64);
  EXPECT_EQ(parts.architecture.rotary.type, RotaryType::kYarn);
  const double m = 0.1 * std::log(40.0) + 1;
  EXPECT_DOUBLE_EQ(read_config(test::published_deepseek_v3()).attention.scale, std::pow(192.0, -0.5) * m * m);
  EXPECT_THAT(deepseek::layout(parts.architecture).skipped, ElementsAre("model.layers.61."));
  EXPECT_EQ(parts.architecture.scale_blocks.rows, 128);
}

TEST(DeepseekConfig, DeepseekV32AsPublished) {
  const DecoderParts parts = read(test::published_deepseek_v32());
  EXPECT_NEAR(double(parameter_count(parts)), 672e9, 0.5e9);
  EXPECT_EQ(state_numbers_per_token(parts) * kBfloat16, 85888);
  EXPECT_EQ(layers_of(parts, "sparse latent attention").size(), 61u);
  EXPECT_EQ(layers_of(parts, "sparse indexer").size(), 61u);
  EXPECT_FALSE(read_config(test::published_deepseek_v32()).indexer->interleaved_rotary);
}

TEST(DeepseekConfig, Glm52AsPublished) {
  const DecoderParts parts = read(test::published_glm_5_2());
  EXPECT_NEAR(double(parameter_count(parts)), 743e9, 1e9) << "GLM-5 is published as 744B; shared indexers save half a billion";
  EXPECT_EQ(state_numbers_per_token(parts) * kBfloat16, 95232);
  std::vector<int64_t> full{0, 1, 2};
  for (int64_t n = 6; n < 78; n += 4) full.push_back(n);
  EXPECT_EQ(full.size(), 21u);
  EXPECT_EQ(layers_of(parts, "sparse indexer"), full);
  EXPECT_EQ(layers_of(parts, "sparse latent attention").size(), 78u);
  EXPECT_EQ(parts.architecture.norm_eps, 1e-5);
  EXPECT_EQ(parts.builder.routers.size(), 75u);
  // GLM-5: no sharing.
  const DecoderParts first = read(without(test::published_glm_5_2(), {"index_topk_freq", "index_skip_topk_offset"}));
  EXPECT_EQ(state_numbers_per_token(first) * kBfloat16, 109824);
  EXPECT_NEAR(double(parameter_count(first)), 744e9, 0.5e9);
}

TEST(DeepseekConfig, TheClassesDiffer) {
  const std::vector<std::string> sizes{
      "q_lora_rank",           "kv_lora_rank",     "qk_rope_head_dim",    "qk_nope_head_dim", "v_head_dim",
      "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_group",          "topk_group",
      "first_k_dense_replace", "index_n_heads",    "index_head_dim",      "index_topk",       "max_position_embeddings"};
  const auto defaults = [&](const char* type) { return read_config(without(tiny_latent_config(type), sizes)); };
  const auto v3 = defaults("deepseek_v3"), v32 = defaults("deepseek_v32"), glm = defaults("glm_moe_dsa");
  EXPECT_EQ(v3.attention.query_rank, 1536);
  EXPECT_EQ(glm.attention.query_rank, 2048);
  EXPECT_EQ(v3.attention.plain_dim, 128);
  EXPECT_EQ(glm.attention.plain_dim, 192);
  EXPECT_EQ(glm.attention.value_dim, 256);
  EXPECT_EQ(v3.routing.groups, 8);
  EXPECT_EQ(v32.routing.chosen_groups, 4);
  EXPECT_EQ(glm.routing.groups, 1);
  EXPECT_EQ(v3.architecture.rotary.max_positions, 4096);
  EXPECT_EQ(v32.architecture.rotary.max_positions, 163840);
  EXPECT_EQ(v3.architecture.norm_eps, 1e-6);
  EXPECT_EQ(glm.architecture.norm_eps, 1e-5);
  EXPECT_FALSE(v3.indexer.has_value());
  EXPECT_EQ(v32.indexer->heads, 64);
  EXPECT_EQ(glm.indexer->heads, 32);
  EXPECT_TRUE(glm.indexer->interleaved_rotary);
  EXPECT_FALSE(v32.indexer->interleaved_rotary);
  for (const auto& config : {v3, v32, glm}) {
    EXPECT_FALSE(config.layers.back().has_experts) << "the first three layers have none";
    EXPECT_EQ(config.experts.experts, 256);
    EXPECT_EQ(config.experts.shared_width, 2048);
    EXPECT_TRUE(config.routing.normalised);
    EXPECT_EQ(config.routing.scale, 2.5);
    EXPECT_EQ(config.architecture.prediction_layers, 1);
  }
}

TEST(DeepseekConfig, NullIsNotTheSameAsMissing) {
  const auto config = [](const json& changes) {
    json whole = tiny_latent_config("deepseek_v3");
    for (const auto& [key, value] : changes.items()) whole[key] = value;  // merge_patch would erase a null
    return whole;
  };
  EXPECT_EQ(read_config(config({{"q_lora_rank", nullptr}})).attention.query_rank, std::nullopt);
  EXPECT_FALSE(read_config(config({{"norm_topk_prob", nullptr}})).routing.normalised);
  EXPECT_FALSE(read_config(config({{"rope_interleave", nullptr}})).attention.interleaved_rotary);
  EXPECT_TRUE(read_config(config(json::object())).attention.interleaved_rotary);
  json sparse = tiny_latent_config("deepseek_v32");
  sparse["q_lora_rank"] = nullptr;
  expect_refused(sparse, {"q_lora_rank", "null", "indexer"});
}

TEST(DeepseekConfig, WithoutYarnTheScaleIsPlain) {
  const auto scale = [](const json& rope) {
    return read_config(tiny_latent_config("deepseek_v3", {{"rope_parameters", rope}})).attention.scale;
  };
  json yarn{{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}};
  EXPECT_DOUBLE_EQ(scale({{"rope_type", "default"}, {"rope_theta", 1e4}}), std::pow(10.0, -0.5));
  EXPECT_DOUBLE_EQ(scale(yarn), std::pow(10.0, -0.5)) << "no mscale_all_dim";
  yarn["mscale_all_dim"] = 0.75;
  const double m = 0.075 * std::log(4.0) + 1;
  EXPECT_DOUBLE_EQ(scale(yarn), std::pow(10.0, -0.5) * m * m);
}

TEST(DeepseekConfig, LayersShareASelectionAsTheKeysSay) {
  const auto own = [](const json& changes) {
    json config = tiny_latent_config("glm_moe_dsa", {{"num_hidden_layers", 5}});
    config.merge_patch(changes);
    std::vector<bool> layers;
    for (const auto& layer : read_config(config).layers) layers.push_back(layer.has_indexer);
    return layers;
  };
  EXPECT_THAT(own(json::object()), ElementsAre(true, true, true, true, true));
  EXPECT_THAT(own({{"index_topk_freq", 2}}), ElementsAre(true, true, false, true, false)) << "the offset is 2";
  EXPECT_THAT(own({{"index_topk_freq", 2}, {"index_skip_topk_offset", 3}}), ElementsAre(true, true, true, false, true));
  EXPECT_THAT(own({{"index_topk_pattern", "FSSFS"}, {"index_topk_freq", 2}}), ElementsAre(true, false, false, true, false));
  EXPECT_THAT(own({{"index_topk_pattern", {"full", "shared", "full", "full", "shared"}}}),
              ElementsAre(true, false, true, true, false));
  EXPECT_THAT(own({{"indexer_types", {"full", "full", "shared", "shared", "full"}}, {"index_topk_pattern", "FSSFS"}}),
              ElementsAre(true, true, false, false, true));
  const auto refused = [](const json& changes, const std::vector<std::string>& words) {
    expect_refused(tiny_latent_config("glm_moe_dsa", changes), words);
  };
  refused({{"index_topk_pattern", "SF"}}, {"index_topk_pattern", "layer 0"});
  refused({{"index_topk_pattern", "FX"}}, {"index_topk_pattern", "F and S"});
  refused({{"index_topk_pattern", "FSS"}}, {"index_topk_pattern", "2 entries"});
  refused({{"indexer_types", {"full", "half"}}}, {"indexer_types", "full or shared"});
  expect_refused(tiny_latent_config("deepseek_v32", {{"index_topk_freq", 2}}), {"index_topk_freq", "every layer"});
}

TEST(DeepseekConfig, LayersHaveExpertsAsTheKeysSay) {
  const auto sparse = [](const std::string& type, const json& changes) {
    json config = tiny_latent_config(type, {{"num_hidden_layers", 3}});
    config.merge_patch(changes);
    std::vector<bool> layers;
    for (const auto& layer : read_config(config).layers) layers.push_back(layer.has_experts);
    return layers;
  };
  EXPECT_THAT(sparse("deepseek_v3", json::object()), ElementsAre(false, true, true));
  EXPECT_THAT(sparse("deepseek_v3", {{"first_k_dense_replace", 0}}), ElementsAre(true, true, true));
  EXPECT_THAT(sparse("glm_moe_dsa", {{"mlp_layer_types", {"sparse", "dense", "sparse"}}}), ElementsAre(true, false, true));
  EXPECT_EQ(read_config(tiny_latent_config("deepseek_v3", {{"n_shared_experts", 0}})).experts.shared_width, 0);
  EXPECT_EQ(read_config(tiny_latent_config("deepseek_v3", {{"n_shared_experts", 2}})).experts.shared_width, 12);
  expect_refused(tiny_latent_config("glm_moe_dsa", {{"mlp_layer_types", {"sparse"}}}), {"mlp_layer_types", "2 entries"});
  expect_refused(tiny_latent_config("glm_moe_dsa", {{"mlp_layer_types", {"sparse", "moe"}}}),
                 {"mlp_layer_types", "dense or sparse"});
}

TEST(DeepseekConfig, WhatCannotBeComputedIsRefusedByName) {
  const auto refused = [](const json& changes, const std::vector<std::string>& words) {
    SCOPED_TRACE(changes.dump());
    expect_refused(tiny_latent_config("deepseek_v32", changes), words);
  };
  refused({{"num_key_value_heads", 2}}, {"num_key_value_heads", "2", "num_attention_heads (4)"});
  refused({{"qk_rope_head_dim", 3}}, {"qk_rope_head_dim", "3", "even"});
  refused({{"index_head_dim", 2}}, {"index_head_dim", "2", "at least qk_rope_head_dim (4)"});
  refused({{"index_topk", 0}}, {"index_topk", "0"});
  refused({{"n_group", 3}}, {"n_group", "3"});
  refused({{"n_group", 8}}, {"n_group", "8", "two"});
  refused({{"topk_group", 5}}, {"topk_group", "5"});
  refused({{"topk_group", 1}}, {"topk_group", "1", "3 experts"});
  refused({{"num_experts_per_tok", 9}}, {"num_experts_per_tok", "9"});
  refused({{"num_experts", 4}}, {"num_experts", "4", "n_routed_experts (8)"});
  refused({{"scoring_func", "softmax"}}, {"scoring_func", "softmax"});
  refused({{"topk_method", "greedy"}}, {"topk_method", "greedy"});
  refused({{"hidden_act", "gelu"}}, {"hidden_act", "gelu"});
  refused({{"mlp_bias", true}}, {"mlp_bias"});
  refused({{"rope_interleave", false}}, {"rope_interleave"});
  refused({{"layer_types", {"full_attention", "deepseek_sparse_attention"}}}, {"layer_types"});
  refused({{"num_nextn_predict_layers", 3}}, {"num_nextn_predict_layers", "3"});
  refused({{"first_k_dense_replace", -1}}, {"first_k_dense_replace", "-1"});
  refused({{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}}}, {"rope_scaling", "linear"});
}

TEST(DeepseekConfig, OtherQuantizedCheckpointsAreRefusedByName) {
  const auto with = [](const json& section) { return tiny_latent_config("deepseek_v3", {{"quantization_config", section}}); };
  const json fp8{{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"weight_block_size", {4, 8}}};
  EXPECT_EQ(read(with(fp8)).architecture.scale_blocks.rows, 4);
  EXPECT_EQ(read(with(fp8)).architecture.scale_blocks.columns, 8);
  EXPECT_EQ(read(with({{"quant_method", "fp8"}})).architecture.scale_blocks.rows, 128);
  const auto changed = [&](const std::string& key, const json& value) {
    json section = fp8;
    section[key] = value;
    json config = tiny_latent_config("deepseek_v3");
    config["quantization_config"] = section;
    return config;
  };
  expect_refused(with({{"quant_method", "gptq"}, {"bits", 4}}), {"quantization_config.quant_method", "gptq", "fp8"});
  expect_refused(with({{"bits", 4}}), {"quantization_config.quant_method"});
  expect_refused(changed("fmt", "e5m2"), {"quantization_config.fmt", "e5m2"});
  expect_refused(changed("activation_scheme", "static"), {"quantization_config.activation_scheme", "static"});
  expect_refused(changed("weight_block_size", nullptr), {"quantization_config.weight_block_size"});
  expect_refused(changed("weight_block_size", json::array({128})), {"quantization_config.weight_block_size", "[128]"});
  expect_refused(changed("weight_block_size", json::array({0, 128})), {"quantization_config.weight_block_size"});
  expect_refused(changed("weight_block_size", json::array({128, "x"})), {"quantization_config.weight_block_size"});
}

TEST(DeepseekConfig, NamesAndShapesAreThoseOfTheFiles) {
  for (const char* variant : {"deepseek_v3", "deepseek_v3_plain", "deepseek_v32", "glm_moe_dsa"}) {
    const auto folder = test::golden_folder(variant);
    const DecoderParts parts = read_parts(folder);
    std::map<std::string, Shape> ours, stored;
    for (const auto& parameter : parts.builder.parameters) ours[parameter->name] = parameter->shape;
    const SafetensorsFile file(folder / "model.safetensors");
    for (const StoredTensor& tensor : file.tensors()) stored[tensor.name] = tensor.shape;
    EXPECT_EQ(ours, stored) << variant;
  }
}

}  // namespace
}  // namespace longstraw::core::model
