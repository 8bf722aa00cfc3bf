#include "core/model/lora.h"

#include "core/base/errors.h"
#include "core/model/adapters.h"
#include "reference/whole_sequence.h"
#include "tests/support/families.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <set>

namespace longstraw::core::model {
namespace {

using testing::HasSubstr;

template <class Exception, class Call>
void expect_refused(Call call, const std::vector<std::string>& names) {
  try {
    call();
    ADD_FAILURE() << "was not refused";
  } catch (const Exception& error) {
    for (const std::string& name : names) EXPECT_THAT(error.what(), HasSubstr(name));
  }
}

LoraConfig lora(int64_t r, std::vector<std::string> targets = {"all-linear"}) {
  LoraConfig config;
  config.r = r;
  config.target_modules = std::move(targets);
  return config;
}

std::vector<std::string> names_of(const Decoder& decoder) {
  std::vector<std::string> names;
  for (const auto& parameter : decoder.parameters()) names.push_back(parameter->name);
  return names;
}

// Other values than the initial ones, so that every adapter has an effect.
void fill(Decoder& decoder, uint64_t seed) {
  at::manual_seed(seed);
  const at::NoGradGuard no_grad;
  for (const auto& parameter : decoder.parameters()) parameter->value.normal_(0.0, 0.3);
}

at::Tensor hidden_of(const Decoder& decoder, Execution& execution, int64_t tokens = 5) {
  const at::NoGradGuard no_grad;
  const at::Tensor ids = (at::arange(tokens, at::kLong) * 7 + 3).remainder(decoder.architecture().vocab);
  const auto where = decoder.positions(at::arange(tokens, at::kLong), {tokens, tokens});
  at::Tensor hidden = decoder.embed(ids, execution);
  for (int64_t n = 0; n < decoder.layers(); ++n) hidden = decoder.layer(n, hidden, where, execution);
  return decoder.final_norm(hidden, execution);
}

at::Tensor hidden_of(const Decoder& decoder) {
  reference::WholeSequence execution(reference::Attention::kTextbook, 0);
  return hidden_of(decoder, execution);
}

nlohmann::json read_json_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

// Which weights are multiplied through linear().
class Recording final : public DelegatingExecution {
 public:
  using DelegatingExecution::DelegatingExecution;
  at::Tensor linear(const at::Tensor& x, const Parameter& weight_OI, const Parameter* bias_O) override {
    used.insert(weight_OI.name);
    return DelegatingExecution::linear(x, weight_OI, bias_O);
  }
  std::set<std::string> used;
};

TEST(Lora, AdaptersAreTheParametersAndTheWeightsAreFrozen) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kFloat);
  const size_t weights = decoder->parameters().size();
  add_lora(*decoder, lora(2, {"q_proj", "down_proj"}));
  EXPECT_EQ(names_of(*decoder), (std::vector<std::string>{"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
                                                          "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
                                                          "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight",
                                                          "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight",
                                                          "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
                                                          "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight",
                                                          "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight",
                                                          "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"}));
  EXPECT_EQ(decoder->weights().size(), weights);
  for (const auto& weight : decoder->weights()) EXPECT_FALSE(weight->value.requires_grad()) << weight->name;
  for (const auto& parameter : decoder->parameters()) {
    EXPECT_TRUE(parameter->value.requires_grad()) << parameter->name;
    EXPECT_EQ(parameter->value.sizes(), at::IntArrayRef(parameter->shape)) << parameter->name;
    EXPECT_EQ(parameter->value.scalar_type(), at::kFloat);
  }
}

TEST(Lora, InitialAIsUniformBelowTheRootOfTheInputsAndBIsZero) {
  const auto decoder = test::tiny_decoder(test::tiny_config({{"intermediate_size", 400}}), at::kDouble);
  add_lora(*decoder, lora(64));
  for (const Adapter& adapter : decoder->adapters()->all) {
    EXPECT_EQ(adapter.b_Or->value.abs().max().item<double>(), 0.0);
    const at::Tensor& a = adapter.a_rI->value;
    const double bound = 1.0 / std::sqrt(double(a.size(1))), count = double(a.numel());
    EXPECT_LE(a.abs().max().item<double>(), bound);
    // A uniform variable in ±bound has variance bound²/3 and fourth moment bound⁴/5: six standard errors of mean and of mean
    // square.
    EXPECT_LE(std::abs(a.mean().item<double>()), 6 * bound / std::sqrt(3 * count)) << adapter.module;
    const double error_of_square = bound * bound * std::sqrt((1.0 / 5 - 1.0 / 9) / count);
    EXPECT_NEAR(a.square().mean().item<double>(), bound * bound / 3, 6 * error_of_square) << adapter.module;
  }
}

TEST(Lora, InitialADependsOnSeedAndNameAlone) {
  const auto initial = [](const LoraConfig& config, const std::string& name) {
    const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
    add_lora(*decoder, config);
    for (const auto& parameter : decoder->parameters()) {
      if (parameter->name == name) return parameter->value.detach().clone();
    }
    return at::Tensor();
  };
  const std::string name = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight";
  const at::Tensor all = initial(lora(3), name);
  EXPECT_TRUE(at::equal(all, initial(lora(3, {"v_proj"}), name)));
  EXPECT_FALSE(at::equal(all, initial(lora(3), "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight")));
  LoraConfig other = lora(3);
  other.seed = 1;
  EXPECT_FALSE(at::equal(all, initial(other, name)));
}

TEST(Lora, TargetsAreNamedAsInPeft) {
  const auto count = [](std::vector<std::string> targets) {
    const auto decoder = test::tiny_decoder(test::tiny_config(), at::kFloat);
    add_lora(*decoder, lora(1, std::move(targets)));
    return decoder->adapters()->all.size();
  };
  EXPECT_EQ(count({"all-linear"}), 14u);
  EXPECT_EQ(count({"q_proj"}), 2u);
  EXPECT_EQ(count({"self_attn.q_proj", "mlp.up_proj"}), 4u);
  EXPECT_EQ(count({"model.layers.1.self_attn.q_proj"}), 1u);
  for (const char* wrong : {"proj", "_proj", "lm_head", "embed_tokens", "input_layernorm", "Q_proj", ""}) {
    expect_refused<ConfigError>([&] { count({"q_proj", wrong}); }, {"lora.target_modules", wrong, "down_proj", "all-linear"});
  }
}

std::string kind_of(const std::string& weight) {
  const std::string module = weight.substr(0, weight.rfind('.'));
  return module.substr(module.rfind('.') + 1);
}

// The rule by names against what the decoders do: every linear operation of the layers can have an adapter, and every adapter is
// used. Not among them are routers, which Hugging Face's classes have no nn.Linear for, and indexers.
TEST(Lora, EveryLinearOperationOfTheLayersCanHaveAnAdapter) {
  for (const auto& family : test::small_families()) {
    const auto decoder = test::tiny_decoder(family.config, at::kDouble);
    reference::WholeSequence whole(reference::Attention::kTextbook, 0);
    Recording recording(whole);
    hidden_of(*decoder, recording);
    std::erase_if(recording.used, [](const std::string& name) {
      return name.ends_with(".gate.weight") || name.find(".router.") != std::string::npos ||
             name.find(".indexer.") != std::string::npos;
    });
    std::set<std::string> kinds;
    for (const std::string& name : recording.used) kinds.insert(kind_of(name));
    add_lora(*decoder, lora(2, {kinds.begin(), kinds.end()}));
    std::set<std::string> adapted;
    for (const Adapter& adapter : decoder->adapters()->all) adapted.insert(adapter.weight->name);
    EXPECT_EQ(adapted, recording.used) << family.name;

    // And all-linear is what of it PEFT can load.
    const auto all = test::tiny_decoder(family.config, at::kDouble);
    add_lora(*all, lora(2));
    const std::string type = family.config["model_type"];
    const std::set<std::string> mamba{"mamba2", "nemotron_h", "falcon_h1"};
    const std::set<std::string> moe{"glm4_moe", "qwen3_next", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"};
    std::erase_if(adapted, [&](const std::string& name) {
      const std::string kind = kind_of(name);
      return (mamba.contains(type) && kind == "out_proj") ||
             (moe.contains(type) && (kind == "gate_proj" || kind == "up_proj" || kind == "down_proj"));
    });
    std::set<std::string> by_all;
    for (const Adapter& adapter : all->adapters()->all) by_all.insert(adapter.weight->name);
    EXPECT_EQ(by_all, adapted) << family.name;
  }
}

TEST(Lora, WhatAllLinearLeavesOutIsSaid) {
  const auto decoder = test::tiny_decoder(test::small_families().at(10).config, at::kFloat);
  ASSERT_EQ(decoder->architecture().model_type, "deepseek_v3");
  add_lora(*decoder, lora(2));
  std::string notes;
  for (const std::string& note : decoder->notes()) notes += note + "\n";
  EXPECT_THAT(notes, HasSubstr("all-linear leaves out kv_b_proj"));
  EXPECT_THAT(notes, HasSubstr("all-linear leaves out routers and routed experts"));
  EXPECT_THAT(notes, HasSubstr("all-linear leaves out gate_proj"));
}

TEST(Lora, AnAdapterThatPeftCantLoadIsSaidToBeOne) {
  for (const auto& family : test::small_families()) {
    if (family.name != "mamba2") continue;
    const auto decoder = test::tiny_decoder(family.config, at::kFloat);
    add_lora(*decoder, lora(2, {"in_proj", "out_proj"}));
    EXPECT_EQ(decoder->adapters()->all.size(), size_t(2 * decoder->layers()));
    ASSERT_FALSE(decoder->notes().empty());
    EXPECT_THAT(decoder->notes().back(), HasSubstr("PEFT can't load this adapter, but merged weights: out_proj"));
  }
}

TEST(Lora, WhatCantHaveAnAdapterIsRefusedByName) {
  const auto refuse = [](const std::string& model_type, std::vector<std::string> targets, std::vector<std::string> names) {
    for (const auto& family : test::small_families()) {
      if (family.config["model_type"] != model_type) continue;
      const auto decoder = test::tiny_decoder(family.config, at::kFloat);
      expect_refused<ConfigError>([&] { add_lora(*decoder, lora(2, targets)); }, names);
      EXPECT_EQ(decoder->adapters(), nullptr);
      return;
    }
    ADD_FAILURE() << "no family " << model_type;
  };
  refuse("deepseek_v3", {"o_proj", "kv_b_proj"},
         {"lora.target_modules: kv_b_proj", "model.layers.0.self_attn.kv_b_proj", "absorbed"});
  refuse("deepseek_v3", {"experts.0.up_proj"}, {"experts.0.up_proj", "routed experts"});
  refuse("deepseek_v32", {"wq_b"}, {"wq_b", "indexer", "no gradient"});
  refuse("deepseek_v3", {"gate"}, {"lora.target_modules: gate", "no linear layer"});
}

TEST(Lora, WrongConfigsAreRefused) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kFloat);
  expect_refused<ConfigError>([&] { add_lora(*decoder, lora(0)); }, {"lora.r", "0"});
  LoraConfig dropout = lora(2);
  dropout.lora_dropout = 0.1;
  expect_refused<ConfigError>([&] { add_lora(*decoder, dropout); }, {"lora.lora_dropout", "0.1", "mask"});
  expect_refused<ConfigError>([&] { merge_lora(*decoder); }, {"no adapters"});
  add_lora(*decoder, lora(2));
  expect_refused<ConfigError>([&] { add_lora(*decoder, lora(2)); }, {"has adapters already"});
}

TEST(Lora, NewAdaptersChangeNothingAndLeavingThemOutGivesTheBase) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const at::Tensor base = hidden_of(*decoder);
  add_lora(*decoder, lora(2));
  EXPECT_TRUE(at::equal(hidden_of(*decoder), base));
  fill(*decoder, 3);
  EXPECT_FALSE(at::allclose(hidden_of(*decoder), base));
  {
    const WithoutAdapters once(*decoder);
    {
      const WithoutAdapters twice(*decoder);
      EXPECT_TRUE(at::equal(hidden_of(*decoder), base));
    }
    EXPECT_TRUE(at::equal(hidden_of(*decoder), base));
  }
  EXPECT_FALSE(at::allclose(hidden_of(*decoder), base));
}

TEST(Lora, MergedWeightsComputeTheSameAndAreTrainedAgain) {
  for (const auto& family : test::small_families()) {
    const auto decoder = test::tiny_decoder(family.config, at::kDouble);
    const auto weights = names_of(*decoder);
    LoraConfig config = lora(3);
    config.lora_alpha = 5.0;
    add_lora(*decoder, config);
    fill(*decoder, 4);
    const at::Tensor adapted = hidden_of(*decoder);
    merge_lora(*decoder);
    EXPECT_EQ(decoder->adapters(), nullptr);
    EXPECT_EQ(names_of(*decoder), weights);
    for (const auto& weight : decoder->weights()) EXPECT_TRUE(weight->value.requires_grad());
    const at::Tensor merged = hidden_of(*decoder);
    EXPECT_LE(((merged - adapted).norm() / adapted.norm()).item<double>(), 1e-10) << family.name;
  }
}

TEST(Lora, VersionOfTheWeightsTellsStatesApart) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const at::NoGradGuard no_grad;
  std::set<uint64_t> seen{decoder->weights_version()};
  const auto is_new = [&] { return seen.insert(decoder->weights_version()).second; };
  decoder->weights()[0]->value.add_(1.0);
  EXPECT_TRUE(is_new()) << "a weight was changed";
  add_lora(*decoder, lora(2));
  EXPECT_TRUE(is_new()) << "adapters were added";
  const uint64_t with = decoder->weights_version();
  {
    const WithoutAdapters without(*decoder);
    EXPECT_TRUE(is_new()) << "adapters were left out";
  }
  EXPECT_EQ(decoder->weights_version(), with);
  decoder->parameters()[1]->value.add_(1.0);
  EXPECT_TRUE(is_new()) << "an adapter was changed";
  merge_lora(*decoder);
  EXPECT_TRUE(is_new()) << "adapters were merged";
}

TEST(Lora, RunsOfOtherAdaptersAreOtherRuns) {
  const auto sha = [](const LoraConfig& config) {
    const auto decoder = test::tiny_decoder(test::tiny_config(), at::kFloat);
    if (config.r > 0) add_lora(*decoder, config);
    return decoder->sha256();
  };
  LoraConfig seed = lora(2), alpha = lora(2);
  seed.seed = 1;
  alpha.lora_alpha = 3;
  EXPECT_EQ(sha(lora(2)), sha(lora(2)));
  EXPECT_EQ(
      (std::set<std::string>{sha(lora(0)), sha(lora(2)), sha(lora(3)), sha(seed), sha(alpha), sha(lora(2, {"q_proj"}))}.size()),
      6u);
}

class LoraFolder : public testing::Test {
 protected:
  void SetUp() override {
    decoder_ = test::tiny_decoder(test::tiny_config(), at::kFloat);
    LoraConfig config = lora(2, {"q_proj", "up_proj"});
    config.lora_alpha = 6.0;
    add_lora(*decoder_, config);
    fill(*decoder_, 5);
    save_adapter(*decoder_, "the/base", folder_.path());
  }
  LoraConfig from_folder() const {
    LoraConfig config;
    config.adapter = folder_.path().string();
    return config;
  }
  // The folder with one key of its config changed, or with other tensors.
  void expect_refused_with(const std::string& key, const nlohmann::json& value, const std::vector<std::string>& names) {
    nlohmann::json config = read_json_file(folder_.path() / "adapter_config.json");
    const nlohmann::json before = config;
    config[key] = value;
    test::write_json(folder_.path() / "adapter_config.json", config);
    const auto fresh = test::tiny_decoder(test::tiny_config(), at::kFloat);
    expect_refused<FormatError>([&] { add_lora(*fresh, from_folder()); }, names);
    EXPECT_EQ(fresh->adapters(), nullptr);
    test::write_json(folder_.path() / "adapter_config.json", before);
  }
  void expect_tensors_refused(const test::Tensors& tensors, const std::vector<std::string>& names) {
    test::write_tensors(folder_.path() / "adapter_model.safetensors", tensors);
    const auto fresh = test::tiny_decoder(test::tiny_config(), at::kFloat);
    expect_refused<FormatError>([&] { add_lora(*fresh, from_folder()); }, names);
    EXPECT_EQ(fresh->adapters(), nullptr);
  }

  test::TemporaryFolder folder_;
  std::unique_ptr<Decoder> decoder_;
};

TEST_F(LoraFolder, ReadsBackBitForBit) {
  const auto fresh = test::tiny_decoder(test::tiny_config(), at::kFloat);
  add_lora(*fresh, from_folder());
  ASSERT_EQ(names_of(*fresh), names_of(*decoder_));
  for (size_t i = 0; i < fresh->parameters().size(); ++i)
    EXPECT_TRUE(at::equal(fresh->parameters()[i]->value, decoder_->parameters()[i]->value)) << fresh->parameters()[i]->name;
  EXPECT_EQ(fresh->adapters()->rank, 2);
  EXPECT_EQ(fresh->adapters()->alpha, 6.0);
  EXPECT_EQ(fresh->adapters()->target_modules, (std::vector<std::string>{"q_proj", "up_proj"}));
  EXPECT_TRUE(at::equal(hidden_of(*fresh), hidden_of(*decoder_)));

  fill(*fresh, 6);
  read_adapter(*fresh, folder_.path());
  EXPECT_TRUE(at::equal(hidden_of(*fresh), hidden_of(*decoder_)));
}

TEST_F(LoraFolder, ConfigSaysWhatPeftAsks) {
  const nlohmann::json config = read_json_file(folder_.path() / "adapter_config.json");
  EXPECT_EQ(config["peft_type"], "LORA");
  EXPECT_EQ(config["base_model_name_or_path"], "the/base");
  EXPECT_EQ(config["r"], 2);
  EXPECT_TRUE(config["lora_alpha"].is_number_integer());
  EXPECT_EQ(config["target_modules"], (nlohmann::json{"q_proj", "up_proj"}));
}

TEST_F(LoraFolder, ConfigsOfOtherKindsAreRefusedByKey) {
  const std::string file = "adapter_config.json";
  expect_refused_with("peft_type", "IA3", {file, "peft_type", "IA3"});
  expect_refused_with("r", 3, {"lora_A", "shape [2, 16]", "wanted [3, 16]"});
  expect_refused_with("use_dora", true, {file, "use_dora"});
  expect_refused_with("use_rslora", true, {file, "use_rslora"});
  expect_refused_with("rank_pattern", {{"q_proj", 4}}, {file, "rank_pattern"});
  expect_refused_with("modules_to_save", {"lm_head"}, {file, "modules_to_save"});
  expect_refused_with("bias", "all", {file, "bias"});
  const auto fresh = test::tiny_decoder(test::tiny_config(), at::kFloat);
  LoraConfig other = from_folder();
  other.r = 4;
  expect_refused<FormatError>([&] { add_lora(*fresh, other); }, {file, "lora.r is 4"});
}

TEST_F(LoraFolder, TensorsThatDoNotFitAreRefusedByName) {
  const test::Tensors good = test::read_tensors(folder_.path() / "adapter_model.safetensors");
  const std::string q = "base_model.model.model.layers.0.self_attn.q_proj.";
  test::Tensors tensors = good;
  tensors.erase(q + "lora_B.weight");
  expect_tensors_refused(tensors, {"adapter_model.safetensors", "layers.0.self_attn.q_proj", "lora_A alone"});
  tensors = good;
  tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = good.at(q + "lora_A.weight");
  tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight"] = good.at(q + "lora_B.weight");
  expect_tensors_refused(tensors, {"model.layers.7.self_attn.q_proj", "no such linear layer"});
  tensors = good;
  tensors[q + "lora_magnitude_vector"] = at::ones({16});
  expect_tensors_refused(tensors, {q + "lora_magnitude_vector"});
  tensors = good;
  tensors[q + "lora_A.weight"] = at::full({2, 16}, NAN);
  expect_tensors_refused(tensors, {q + "lora_A.weight", "not a finite number"});
  tensors = good;
  tensors[q + "lora_B.weight"] = at::ones({15, 2});
  expect_tensors_refused(tensors, {q + "lora_B.weight", "[15, 2]", "[16, 2]"});
}

TEST_F(LoraFolder, AdaptersOfOtherModulesAreNotReadBack) {
  const auto fresh = test::tiny_decoder(test::tiny_config(), at::kFloat);
  add_lora(*fresh, lora(2));
  expect_refused<FormatError>([&] { read_adapter(*fresh, folder_.path()); }, {"adapter_config.json", "lora_alpha 6", "16"});
  LoraConfig config = lora(2, {"q_proj"});
  config.lora_alpha = 6.0;
  const auto fewer = test::tiny_decoder(test::tiny_config(), at::kFloat);
  add_lora(*fewer, config);
  expect_refused<FormatError>([&] { read_adapter(*fewer, folder_.path()); }, {"adapter_model.safetensors", "4", "2"});
}

}  // namespace
}  // namespace longstraw::core::model
