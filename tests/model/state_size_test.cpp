// What a prefix leaves, in bytes, of published models: from their config.json alone.
#include "core/model/describe.h"

#include "core/base/errors.h"
#include "core/model/registry.h"
#include "core/model/state_size.h"
#include "tests/support/fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

namespace longstraw::core::model {
namespace {

using nlohmann::json;

constexpr int64_t kTokens = 2'097'152;

std::filesystem::path published(const std::string& name) { return std::filesystem::path("fixtures/configs") / name; }

struct Published {
  std::string name;
  int64_t bytes_per_token;
  int64_t fixed_bytes;
  double billions;         // of parameters, as the model is published
  int64_t not_chosen = 0;  // numbers of the experts that a token leaves out
};

void PrintTo(const Published& published, std::ostream* out) { *out << published.name; }

class PublishedModel : public testing::TestWithParam<Published> {};

// The figures are worked out by hand: bytes a token are 2 · (numbers a token), fixed bytes 4 · recurrent + 2 · convolution
// (or 2 · 2 · kv heads · head size · (window - 1)). Mamba-2's convolution has K - 1 = 3 columns.
TEST_P(PublishedModel, LeavesTheBytesThatItsConfigurationSays) {
  const Published& wanted = GetParam();
  const DecoderParts parts = read_parts(published(wanted.name));
  const StateSize all = total(state_sizes(parts.builder.states, c10::kBFloat16, kTokens));
  EXPECT_EQ(all.bytes_per_token, wanted.bytes_per_token);
  EXPECT_EQ(all.fixed_bytes, wanted.fixed_bytes);
  EXPECT_EQ(all.bytes, wanted.bytes_per_token * kTokens + wanted.fixed_bytes);

  const auto said = describe(published(wanted.name), {.tokens = kTokens});
  EXPECT_EQ(said.at("state_dtype"), "bfloat16");
  EXPECT_EQ(said.at("state_bytes_per_token"), wanted.bytes_per_token);
  EXPECT_EQ(said.at("state_fixed_bytes"), wanted.fixed_bytes);
  EXPECT_EQ(said.at("prefix").at("state_bytes"), all.bytes);
  EXPECT_FALSE(said.contains("files")) << "there are none";
}

TEST_P(PublishedModel, HasAsManyParametersAsItIsKnownFor) {
  const Published& wanted = GetParam();
  const ParameterCounts counts = count_parameters(read_parts(published(wanted.name)));
  EXPECT_NEAR(double(counts.total) / 1e9, wanted.billions, 0.01 * wanted.billions) << "published figures have three digits at most";
  EXPECT_EQ(counts.total - counts.active, wanted.not_chosen);
}

INSTANTIATE_TEST_SUITE_P(
    Configs, PublishedModel,
    testing::Values(Published{"qwen3.6-27b", 65'536, 153'944'064, 27},
                    Published{"qwen3.6-35b-a3b", 20'480, 64'389'120, 34.7, 40LL * (256 - 8) * 3 * 512 * 2048},
                    Published{"qwen3-next-80b-a3b", 24'576, 77'266'944, 80, 48LL * (512 - 10) * 3 * 512 * 2048},
                    Published{"glm-5", 109'824, 0, 744, 75LL * (256 - 8) * 3 * 2048 * 6144},
                    Published{"glm-5.2", 95'232, 0, 744, 75LL * (256 - 8) * 3 * 2048 * 6144},
                    Published{"deepseek-v3.2", 85'888, 0, 671, 58LL * (256 - 8) * 3 * 2048 * 7168},
                    Published{"llama-3.1-8b", 131'072, 0, 8.03}, Published{"mistral-7b-v0.1", 0, 536'739'840, 7.24},
                    Published{"mistral-7b-v0.3", 131'072, 0, 7.25}, Published{"mamba2-2.7b", 0, 169'836'544, 2.7},
                    Published{"mamba-codestral-7b", 0, 272'367'616, 7.29},
                    Published{"nemotron-3-nano-30b-a3b", 6'144, 49'082'368, 31.6, 23LL * (128 - 6) * 2 * 1856 * 2688},
                    Published{"granite-4.0-h-tiny", 8'192, 57'341'952, 7, 40LL * (64 - 6) * 3 * 512 * 1536},
                    Published{"bamba-9b-v1", 12'288, 123'104'768, 9.78}),
    [](const auto& info) {
      std::string name = info.param.name;
      std::replace_if(
          name.begin(), name.end(), [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
      return name;
    });

const StateSize& kind(const std::vector<StateSize>& sizes, const std::string& name) {
  const auto found = std::find_if(sizes.begin(), sizes.end(), [&](const StateSize& size) { return size.kind == name; });
  if (found == sizes.end()) throw std::out_of_range(name);
  return *found;
}

TEST(StateSize, IsGivenByKindOfMixerInTheOrderOfTheLayers) {
  const auto sizes = state_sizes(read_parts(published("glm-5.2")).builder.states, c10::kBFloat16, 1000);
  ASSERT_EQ(sizes.size(), 2);
  EXPECT_EQ(sizes[0].layers, 78);
  EXPECT_EQ(sizes[0].bytes_per_token, 78 * 2 * (512 + 64));
  EXPECT_EQ(kind(sizes, "sparse indexer").layers, 21) << "the other layers share a selection";
  EXPECT_EQ(kind(sizes, "sparse indexer").bytes_per_token, 21 * 2 * 128);
  EXPECT_EQ(kind(sizes, "sparse indexer").adjoint_bytes, 0) << "no gradient flows into the keys of an indexer";
  EXPECT_EQ(sizes[0].adjoint_bytes, 2 * sizes[0].bytes) << "float32";
}

TEST(StateSize, OfAWindowStopsGrowingButAnExactGradientNeedsEveryToken) {
  const auto states = read_parts(published("mistral-7b-v0.1")).builder.states;
  const int64_t row = 32 * 2 * 2 * 8 * 128;
  for (const int64_t tokens : {1, 4094, 4095, 4096, 100'000}) {
    const StateSize all = total(state_sizes(states, c10::kBFloat16, tokens));
    EXPECT_EQ(all.bytes, row * std::min<int64_t>(tokens, 4095)) << tokens;
    EXPECT_EQ(all.exact_bytes, row * tokens);
    EXPECT_EQ(all.adjoint_bytes, 2 * row * tokens);
  }
}

TEST(StateSize, KeepsRecurrentStatesWide) {
  const auto states = read_parts(published("mamba2-2.7b")).builder.states;
  const int64_t recurrent = 64LL * 80 * 64 * 128, convolution = 64LL * (5120 + 2 * 128) * 3;
  EXPECT_EQ(total(state_sizes(states, c10::kBFloat16, 5)).bytes, 4 * recurrent + 2 * convolution);
  EXPECT_EQ(total(state_sizes(states, c10::kFloat, 5)).bytes, 4 * (recurrent + convolution));
  EXPECT_EQ(total(state_sizes(states, c10::kDouble, 5)).bytes, 8 * (recurrent + convolution));
  EXPECT_EQ(total(state_sizes(states, c10::kBFloat16, 5)).border_bytes, 4 * recurrent + 2 * convolution);
  EXPECT_EQ(total(state_sizes(states, c10::kBFloat16, 5)).adjoint_bytes, 4 * (recurrent + convolution));
}

TEST(StateSize, OfAHybridIsTheSumOfItsKinds) {
  const auto sizes = state_sizes(read_parts(published("qwen3.6-27b")).builder.states, c10::kBFloat16, kTokens);
  EXPECT_EQ(kind(sizes, "full attention").layers, 16);
  EXPECT_EQ(kind(sizes, "gated delta rule").layers, 48);
  EXPECT_EQ(kind(sizes, "gated delta rule").bytes, 153'944'064) << "whatever the number of tokens";
  EXPECT_EQ(total(sizes).bytes, 137'592'897'536) << "128.14 GiB";
}

TEST(StateSize, OfExpertChoicesIsTwoBytesForEachWhileTheirNumbersFit) {
  EXPECT_EQ(expert_choice_bytes({{.layer = 0, .experts = 512, .chosen = 10}, {.layer = 1, .experts = 40'000, .chosen = 3}}),
            20 + 12);
}

TEST(Describe, TakesTheDtypeOfTheConfigurationWhereThereAreNoFiles) {
  json config = test::tiny_config();
  const auto dtype_of = [](const json& written) {
    const test::TemporaryFolder folder;
    test::write_json(folder.path() / "config.json", written);
    return describe(folder.path()).at("state_dtype");
  };
  EXPECT_EQ(dtype_of(config), "bfloat16") << "none is stated";
  config["torch_dtype"] = "float32";
  EXPECT_EQ(dtype_of(config), "float32");
  config["dtype"] = "float64";
  EXPECT_EQ(dtype_of(config), "float64") << "the newer key";
  config["dtype"] = "float8_e4m3fn";
  EXPECT_THROW(dtype_of(config), FormatError);
}

TEST(Describe, GivesFilesAndTheirDtypeWhereThereAreSome) {
  const auto said = describe(test::golden_folder("qwen3_bfloat16"), {.tokens = 7});
  EXPECT_EQ(said.at("state_dtype"), "bfloat16");
  EXPECT_EQ(said.at("files").size(), 1);
  EXPECT_EQ(describe(test::golden_folder("qwen3_bfloat16"), {.dtype = c10::kFloat}).at("state_bytes_per_token"),
            2 * said.at("state_bytes_per_token").get<int64_t>());
}

}  // namespace
}  // namespace longstraw::core::model
