#include "core/model/save.h"

#include "core/base/errors.h"
#include "core/model/checkpoint.h"
#include "core/model/lora.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <regex>
#include <set>

namespace longstraw::core::model {
namespace {

using test::TemporaryFolder;
using testing::HasSubstr;

// The words that Python writes and JSON does not know, as texts.
nlohmann::json read_config(const std::filesystem::path& folder) {
  std::ifstream file(folder / "config.json");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  return nlohmann::json::parse(std::regex_replace(text, std::regex(R"re(([^"\w-])(-?Infinity|NaN))re"), R"re($1"$2")re"));
}

// An optimizer step of a kind: every weight is another one after it.
void change(Decoder& decoder, uint64_t seed) {
  at::manual_seed(seed);
  const at::NoGradGuard no_grad;
  for (const auto& weight : decoder.weights()) weight->value.add_(at::randn_like(weight->value) * 0.01);
}

void expect_same_model(const Decoder& got, const Decoder& wanted) {
  ASSERT_EQ(got.weights().size(), wanted.weights().size());
  for (size_t i = 0; i < got.weights().size(); ++i) {
    EXPECT_EQ(got.weights()[i]->name, wanted.weights()[i]->name);
    EXPECT_TRUE(at::equal(got.weights()[i]->value, wanted.weights()[i]->value)) << got.weights()[i]->name;
  }
  const auto constants = got.constants(), wanted_constants = wanted.constants();
  ASSERT_EQ(constants.size(), wanted_constants.size());
  for (size_t i = 0; i < constants.size(); ++i)
    EXPECT_TRUE(at::equal(constants[i]->value, wanted_constants[i]->value)) << constants[i]->name;
}

bool is_scale(const std::string& name) { return name.ends_with("_scale_inv"); }

class SavedGolden : public testing::TestWithParam<std::string> {};

// In each dtype of a run, whatever the file's.
TEST_P(SavedGolden, ReadsBackBitForBitInTheLayoutItHad) {
  const auto source = test::golden_folder(GetParam());
  const Checkpoint before(source);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const auto decoder = load_decoder(source, dtype, at::kCPU);
    change(*decoder, 1);
    const TemporaryFolder folder;
    save_checkpoint(*decoder, source, folder.path());
    expect_same_model(*load_decoder(folder.path(), dtype, at::kCPU), *decoder);

    const Checkpoint after(folder.path());
    int64_t scales = 0, carried = 0;
    for (const auto& [name, entry] : before.tensors()) {
      const auto found = after.tensors().find(name);
      if (is_scale(name)) {
        ++scales;
        EXPECT_EQ(found, after.tensors().end()) << name;
        continue;
      }
      ASSERT_NE(found, after.tensors().end()) << name;
      EXPECT_EQ(found->second.tensor->shape, entry.tensor->shape) << name;
      const auto old_bytes = entry.tensor->bytes, new_bytes = found->second.tensor->bytes;
      carried += std::equal(old_bytes.begin(), old_bytes.end(), new_bytes.begin(), new_bytes.end()) ? 1 : 0;
    }
    EXPECT_EQ(after.tensors().size() + scales, before.tensors().size());
    // All that was trained is another.
    const auto constants = int64_t(decoder->constants().size());
    if (GetParam().find("multimodal") == std::string::npos && GetParam().find("old_keys") == std::string::npos && scales == 0) {
      EXPECT_EQ(carried, constants);
    }
    const auto config = read_config(folder.path());
    EXPECT_FALSE(config.contains("quantization_config"));
    const std::string key = config.contains("dtype") ? "dtype" : "torch_dtype";
    EXPECT_EQ(config[key], dtype == at::kDouble ? "float64" : dtype == at::kFloat ? "float32" : "bfloat16");
  }
}

TEST_P(SavedGolden, AConfigSaysWhatItSaidBut) {
  const auto source = test::golden_folder(GetParam());
  const auto decoder = load_decoder(source, at::kFloat, at::kCPU);
  const TemporaryFolder folder;
  save_checkpoint(*decoder, source, folder.path());
  auto before = read_config(source), after = read_config(folder.path());
  for (nlohmann::json* config : {&before, &after}) {
    for (const char* key : {"dtype", "torch_dtype", "quantization_config"}) {
      config->erase(key);
      if (config->contains("text_config")) (*config)["text_config"].erase(key);
    }
  }
  EXPECT_EQ(after, before);
}

INSTANTIATE_TEST_SUITE_P(Golden, SavedGolden, testing::ValuesIn(test::golden_variants()),
                         [](const auto& info) { return info.param; });

class Saving : public testing::Test {
 protected:
  void SetUp() override {
    test::write_checkpoint(source_.path(), test::tiny_config());
    decoder_ = load_decoder(source_.path(), at::kFloat, at::kCPU);
  }
  template <class Exception>
  void expect_refused(const std::vector<std::string>& names) {
    try {
      save_checkpoint(*decoder_, source_.path(), folder_.path());
      ADD_FAILURE() << "was not refused";
    } catch (const Exception& error) {
      for (const std::string& name : names) EXPECT_THAT(error.what(), HasSubstr(name));
    }
  }
  test::Tensors tensors() const { return test::read_tensors(source_.path() / "model.safetensors"); }
  void write(const test::Tensors& tensors) const { test::write_tensors(source_.path() / "model.safetensors", tensors); }

  TemporaryFolder source_, folder_;
  std::unique_ptr<Decoder> decoder_;
};

TEST_F(Saving, ShardsAreNoLargerThanAskedAndTheIndexNamesThem) {
  change(*decoder_, 2);
  save_checkpoint(*decoder_, source_.path(), folder_.path(), {.max_shard_bytes = 4000});
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "model.safetensors"));
  const Checkpoint saved(folder_.path());
  ASSERT_GT(saved.files().size(), 3u);
  int64_t total = 0;
  for (const SafetensorsFile& file : saved.files()) {
    int64_t bytes = 0;
    for (const StoredTensor& tensor : file.tensors()) bytes += int64_t(tensor.bytes.size());
    EXPECT_TRUE(bytes <= 4000 || file.tensors().size() == 1) << file.path();
    EXPECT_EQ(file.metadata().at("format"), "pt");
    total += bytes;
  }
  std::ifstream index(folder_.path() / "model.safetensors.index.json");
  EXPECT_EQ(nlohmann::json::parse(index)["metadata"]["total_size"], total);
  expect_same_model(*load_decoder(folder_.path(), at::kFloat, at::kCPU), *decoder_);
}

TEST_F(Saving, CompanionsAreCopiedAndWeightsOfTheSourceAreNot) {
  const std::vector<std::string> companions{"tokenizer.json", "tokenizer_config.json", "generation_config.json",
                                            "vocab.txt",      "tokenizer.model",       "chat_template.jinja",
                                            "LICENSE",        "modeling_x.py"};
  const std::vector<std::string> others{"pytorch_model.bin", "model.gguf", "adapter_config.json", "old.safetensors",
                                        ".hidden.json"};
  for (const auto& names : {companions, others}) {
    for (const std::string& name : names) std::ofstream(source_.path() / name) << "{\"eos_token_id\": 1} " << name;
  }
  test::write_json(source_.path() / "generation_config.json", {{"eos_token_id", 1}});
  save_checkpoint(*decoder_, source_.path(), folder_.path());
  std::set<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) found.insert(entry.path().filename().string());
  std::set<std::string> wanted(companions.begin(), companions.end());
  wanted.insert({"config.json", "model.safetensors"});
  EXPECT_EQ(found, wanted);
  std::ifstream copied(folder_.path() / "vocab.txt");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(copied), {}), "{\"eos_token_id\": 1} vocab.txt");
}

TEST_F(Saving, AdaptersAreWrittenMergedUnlessTheyAreLeftOut) {
  LoraConfig lora;
  lora.r = 2;
  add_lora(*decoder_, lora);
  {
    const at::NoGradGuard no_grad;
    for (const auto& parameter : decoder_->parameters()) parameter->value.normal_(0.0, 0.3);
  }
  {
    const WithoutAdapters without(*decoder_);
    const TemporaryFolder base;
    save_checkpoint(*decoder_, source_.path(), base.path());
    expect_same_model(*load_decoder(base.path(), at::kFloat, at::kCPU), *decoder_);
  }
  save_checkpoint(*decoder_, source_.path(), folder_.path());
  merge_lora(*decoder_);
  expect_same_model(*load_decoder(folder_.path(), at::kFloat, at::kCPU), *decoder_);
}

TEST_F(Saving, AnotherSourceIsRefused) {
  test::write_checkpoint(source_.path(), test::tiny_config({{"num_hidden_layers", 3}}));
  expect_refused<FormatError>({source_.path().string(), "model.layers.2.", "another checkpoint"});
  test::write_checkpoint(source_.path(), test::tiny_config({{"num_hidden_layers", 1}}));
  expect_refused<FormatError>({source_.path().string(), "model.layers.1.", "another checkpoint"});
  test::write_checkpoint(source_.path(), test::tiny_config());
  auto fewer = tensors();
  fewer.erase("model.norm.weight");
  write(fewer);
  expect_refused<FormatError>({source_.path().string(), "model.norm.weight", "missing"});
}

TEST_F(Saving, ASourceWithOtherConstantsIsRefused) {
  const auto golden = test::golden_folder("deepseek_v3");
  decoder_ = load_decoder(golden, at::kFloat, at::kCPU);
  std::filesystem::copy(golden, source_.path(),
                        std::filesystem::copy_options::recursive | std::filesystem::copy_options::overwrite_existing);
  save_checkpoint(*decoder_, source_.path(), folder_.path());
  auto other = tensors();
  const std::string name = "model.layers.1.mlp.gate.e_score_correction_bias";
  other.at(name) = other.at(name) + 1;
  write(other);
  expect_refused<FormatError>({"model.safetensors", name, "other values"});
}

TEST_F(Saving, TheSourceIsNotWrittenOver) {
  try {
    save_checkpoint(*decoder_, source_.path(), source_.path() / ".");
    ADD_FAILURE() << "was not refused";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr(source_.path().string()));
  }
}

TEST_F(Saving, ADiskThatFillsIsAnErrorThatNamesTheFile) {
  // No file may grow beyond this: for the writer it is as if the disk were full.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 3000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_refused<IoError>({(folder_.path() / "model.safetensors").string(), "writing failed"});
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
  save_checkpoint(*decoder_, source_.path(), folder_.path());
  expect_same_model(*load_decoder(folder_.path(), at::kFloat, at::kCPU), *decoder_);
}

TEST_F(Saving, AFolderThatIsNotThereIsAnErrorThatNamesIt) {
  std::filesystem::remove(folder_.path());
  expect_refused<IoError>({(folder_.path() / "model.safetensors").string()});
  std::filesystem::create_directory(folder_.path());
}

TEST(MixInto, IsTheWeightedMean) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const auto target = test::tiny_decoder(test::tiny_config(), dtype, 1),
               before = test::tiny_decoder(test::tiny_config(), dtype, 1);
    const auto source = test::tiny_decoder(test::tiny_config(), dtype, 2);
    const uint64_t version = target->weights_version();
    mix_into(*target, *source, 0.6);
    EXPECT_NE(target->weights_version(), version);
    const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
    for (size_t i = 0; i < target->weights().size(); ++i) {
      const at::Tensor a = source->weights()[i]->value.to(wide), b = before->weights()[i]->value.to(wide);
      EXPECT_TRUE(at::equal(target->weights()[i]->value, (0.6 * a + 0.4 * b).to(dtype)));
      EXPECT_TRUE(target->weights()[i]->value.requires_grad());
    }
    mix_into(*target, *source, 1.0);
    expect_same_model(*target, *source);
  }
}

TEST(MixInto, OtherModelsAndAdaptersAreRefused) {
  const auto target = test::tiny_decoder(test::tiny_config(), at::kFloat);
  const auto other = test::tiny_decoder(test::tiny_config({{"num_hidden_layers", 1}}), at::kFloat);
  EXPECT_THROW(mix_into(*target, *other, 0.5), ConfigError);
  EXPECT_THROW(mix_into(*other, *target, 0.5), ConfigError);
  LoraConfig lora;
  lora.r = 2;
  const auto adapted = test::tiny_decoder(test::tiny_config(), at::kFloat);
  add_lora(*adapted, lora);
  EXPECT_THROW(mix_into(*adapted, *target, 0.5), ConfigError);
}

}  // namespace
}  // namespace longstraw::core::model
