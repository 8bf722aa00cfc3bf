// config.json in the spellings that exist, the defaults that bite, and what is refused by name.
#include "core/model/architecture.h"

#include "core/base/errors.h"
#include "tests/support/fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

namespace longstraw::core::model {
namespace {

using nlohmann::json;
using test::tiny_config;
using testing::ElementsAre;
using testing::HasSubstr;

Architecture read(const json& config, const json& generation = nullptr) {
  const test::TemporaryFolder folder;
  test::write_json(folder.path() / "config.json", config);
  if (!generation.is_null()) test::write_json(folder.path() / "generation_config.json", generation);
  return read_architecture(folder.path());
}

template <class E = FormatError>
void expect_refused(const json& config, const std::vector<std::string>& words) {
  try {
    read(config);
    FAIL() << "was accepted: " << config.dump();
  } catch (const E& error) {
    for (const auto& word : words) EXPECT_THAT(error.what(), HasSubstr(word));
  }
}

json without(json config, const std::string& key) {
  config.erase(key);
  return config;
}

TEST(Architecture, TakesTheDefaultsOfTransformers) {
  const Architecture a = read(without(without(tiny_config(), "num_key_value_heads"), "rms_norm_eps"));
  EXPECT_EQ(a.head_dim, 4);
  EXPECT_EQ(a.kv_heads, 4);
  EXPECT_EQ(a.norm_eps, 1e-6);
  EXPECT_FALSE(a.tied_embeddings);
  EXPECT_FALSE(a.query_key_value_bias);
  EXPECT_THAT(a.window, ElementsAre(std::nullopt, std::nullopt));
  EXPECT_TRUE(a.eos_ids.empty());

  EXPECT_EQ(read(tiny_config({{"model_type", "qwen3"}})).head_dim, 128) << "not hidden / heads";
  EXPECT_TRUE(read(tiny_config({{"model_type", "qwen3"}})).query_key_norm);
  EXPECT_TRUE(read(tiny_config({{"model_type", "qwen2"}})).query_key_value_bias);
  EXPECT_FALSE(read(tiny_config({{"model_type", "qwen2"}})).attention_output_bias);
  EXPECT_TRUE(read(tiny_config({{"attention_bias", true}})).attention_output_bias);
  EXPECT_EQ(read(tiny_config({{"head_dim", 8}})).head_dim, 8);
}

TEST(Architecture, NullIsNotTheSameAsMissing) {
  json config = tiny_config({{"model_type", "mistral"}});
  EXPECT_THAT(read(config).window, ElementsAre(4096, 4096)) << "the first release had no key";
  config["sliding_window"] = nullptr;
  EXPECT_THAT(read(config).window, ElementsAre(std::nullopt, std::nullopt));
  config["sliding_window"] = 12;
  EXPECT_THAT(read(config).window, ElementsAre(12, 12));
  config["num_key_value_heads"] = nullptr;
  EXPECT_EQ(read(config).kv_heads, 4);
  config.erase("num_key_value_heads");
  config["num_attention_heads"] = 8;
  EXPECT_EQ(read(config).kv_heads, 8) << "mistral's class has 8";
}

TEST(Architecture, QwenHasAWindowOnlyWhereItSaysSo) {
  json config = tiny_config({{"model_type", "qwen2"}, {"num_hidden_layers", 3}, {"sliding_window", 10}, {"max_window_layers", 1}});
  EXPECT_THAT(read(config).window, ElementsAre(std::nullopt, std::nullopt, std::nullopt));
  config["use_sliding_window"] = true;
  EXPECT_THAT(read(config).window, ElementsAre(std::nullopt, 10, 10));
  config["layer_types"] = {"sliding_attention", "full_attention", "full_attention"};
  EXPECT_THAT(read(config).window, ElementsAre(10, std::nullopt, std::nullopt));
  config["use_sliding_window"] = false;
  expect_refused(config, {"sliding_window", "layer_types"});
  config["layer_types"] = {"full_attention"};
  expect_refused(config, {"layer_types", "3 entries"});
  config["layer_types"] = {"full_attention", "full_attention", "linear_attention"};
  expect_refused(config, {"layer_types", "linear_attention"});
}

TEST(Architecture, EosIdsComeFromGenerationConfigFirst) {
  EXPECT_THAT(read(tiny_config({{"eos_token_id", 2}})).eos_ids, ElementsAre(2));
  EXPECT_THAT(read(tiny_config({{"eos_token_id", {2, 3}}})).eos_ids, ElementsAre(2, 3));
  EXPECT_THAT(read(tiny_config({{"eos_token_id", 2}}), {{"eos_token_id", {4, 5}}}).eos_ids, ElementsAre(4, 5));
  EXPECT_THAT(read(tiny_config({{"eos_token_id", 2}}), {{"temperature", 0.6}}).eos_ids, ElementsAre(2));
}

TEST(Architecture, ReadsOldAndNewRotaryKeysAlike) {
  const auto rotary = [](const json& changes) {
    json config = without(tiny_config(), "rope_theta");
    config.merge_patch(changes);
    return read(config).rotary;
  };
  EXPECT_EQ(rotary(json::object()).theta, 10000.0);
  EXPECT_EQ(rotary({{"rope_theta", 5e5}}).theta, 5e5);
  EXPECT_EQ(rotary({{"rope_theta", 5e5}, {"rope_parameters", {{"rope_theta", 2e4}}}}).theta, 2e4) << "the inner one wins";
  const Rotary old_keys = rotary({{"rope_theta", 2e4}, {"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}}});
  const Rotary new_keys = rotary({{"rope_parameters", {{"rope_type", "linear"}, {"factor", 2.0}, {"rope_theta", 2e4}}}});
  for (const Rotary& r : {old_keys, new_keys}) {
    EXPECT_EQ(r.type, RotaryType::kLinear);
    EXPECT_EQ(r.factor, 2.0);
    EXPECT_EQ(r.theta, 2e4);
    EXPECT_EQ(r.original_max_positions, 512);
  }
  const json yarn{{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}};
  EXPECT_EQ(rotary({{"rope_scaling", yarn}}).original_max_positions, 64);
  EXPECT_EQ(rotary({{"rope_scaling", yarn}, {"original_max_position_embeddings", 32}}).original_max_positions, 32);
}

TEST(Architecture, AWrongKeyIsNamedWithWhatItHolds) {
  expect_refused(without(tiny_config(), "hidden_size"), {"config.json", "hidden_size", "nothing"});
  expect_refused(tiny_config({{"hidden_size", "big"}}), {"hidden_size", "\"big\"", "whole number > 0"});
  expect_refused(tiny_config({{"num_hidden_layers", 0}}), {"num_hidden_layers", "0"});
  expect_refused(tiny_config({{"num_hidden_layers", 2.5}}), {"num_hidden_layers", "2.5"});
  expect_refused(tiny_config({{"num_attention_heads", -4}}), {"num_attention_heads", "-4"});
  expect_refused(tiny_config({{"rms_norm_eps", "1e-5"}}), {"rms_norm_eps", "number > 0"});
  expect_refused(tiny_config({{"tie_word_embeddings", 1}}), {"tie_word_embeddings", "true or false"});
  expect_refused(tiny_config({{"num_key_value_heads", 3}}), {"num_key_value_heads", "3", "divisor"});
  expect_refused(tiny_config({{"num_attention_heads", 3}, {"num_key_value_heads", 1}}), {"hidden_size", "multiple"});
  expect_refused(tiny_config({{"head_dim", 5}}), {"head_dim", "even"});
  expect_refused(tiny_config({{"eos_token_id", "</s>"}}), {"eos_token_id"});
  expect_refused(tiny_config({{"rope_theta", -1}}), {"rope_theta"});
  expect_refused(tiny_config({{"rope_scaling", {{"type", "magic"}}}}), {"rope_scaling.type", "magic", "llama3"});
  expect_refused(tiny_config({{"rope_scaling", {{"type", "linear"}}}}), {"rope_scaling.factor", "nothing"});
  expect_refused(tiny_config({{"rope_scaling", {{"rope_type", "longrope"}, {"short_factor", {1}}, {"long_factor", {1, 1}}}}}),
                 {"short_factor", "2 numbers"});
  expect_refused(tiny_config({{"rope_scaling", 7}}), {"rope_scaling", "an object"});
  expect_refused(json::array({1}), {"config.json", "not a JSON object"});
}

TEST(Architecture, UnsupportedFeaturesAreNamed) {
  expect_refused(tiny_config({{"hidden_act", "gelu"}}), {"hidden_act", "gelu"});
  expect_refused(tiny_config({{"pretraining_tp", 2}}), {"pretraining_tp", "2"});
  expect_refused(tiny_config({{"attention_dropout", 0.1}}), {"attention_dropout"});
  expect_refused(tiny_config({{"model_type", "qwen2"}, {"dual_chunk_attention_config", {{"chunk_size", 4}}}}),
                 {"dual chunk attention"});
  expect_refused(tiny_config({{"quantization_config", {{"bits", 4}}}}), {"quantization_config"});
  expect_refused(tiny_config({{"partial_rotary_factor", 0.5}}), {"partial_rotary_factor"});
  expect_refused(tiny_config({{"model_type", "mistral"}, {"layer_types", {"full_attention", "sliding_attention"}}}),
                 {"layer_types"});
  expect_refused<ConfigError>(tiny_config({{"model_type", "quen3"}}),
                              {"config.json", "quen3", "llama, mistral, qwen2, qwen3", "nearest: qwen3"});
  expect_refused(without(tiny_config(), "model_type"), {"model_type", "nothing"});
}

TEST(Architecture, AFileThatIsNotJsonIsRefused) {
  const test::TemporaryFolder folder;
  EXPECT_THROW(read_architecture(folder.path()), FormatError);
  std::ofstream(folder.path() / "config.json") << "{\"model_type\": \"llama\"";
  EXPECT_THROW(read_architecture(folder.path()), FormatError);
}

}  // namespace
}  // namespace longstraw::core::model
