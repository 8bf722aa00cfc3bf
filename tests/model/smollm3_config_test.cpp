// config.json of SmolLM3: which layers have no position embedding, which a window, and the published model.
#include "tests/model/config_reading.h"

namespace longstraw::core::model {
namespace {

using nlohmann::json;
using testing::ElementsAre;

json smollm3(const json& changes = json::object()) {
  return merged({{"model_type", "smollm3"},
                 {"num_hidden_layers", 4},
                 {"hidden_size", 64},
                 {"intermediate_size", 32},
                 {"num_attention_heads", 8},
                 {"vocab_size", 32}},
                changes);
}

std::vector<bool> rotated_layers(const DecoderParts& parts) {
  std::vector<bool> rotated;
  for (const Layer& layer : parts.layers) {
    rotated.push_back(std::get<AttentionShape>(layer.residuals[0].blocks[0]->shape()).rotary);
  }
  return rotated;
}

TEST(Smollm3Config, EveryFourthLayerHasNoPositionsUnlessSaidOtherwise) {
  const DecoderParts parts = read_config(smollm3());
  EXPECT_THAT(rotated_layers(parts), ElementsAre(true, true, true, false));
  EXPECT_EQ(parts.architecture.kv_heads, 4);
  EXPECT_EQ(parts.architecture.rotary.theta, 2e6);
  EXPECT_TRUE(parts.architecture.tied_embeddings);
  EXPECT_THAT(rotated_layers(read_config(smollm3({{"no_rope_layer_interval", 2}}))), ElementsAre(true, false, true, false));
  EXPECT_THAT(rotated_layers(read_config(smollm3({{"no_rope_layers", {0, 1, 1, 1}}}))), ElementsAre(false, true, true, true));
  expect_refused(smollm3({{"no_rope_layers", {0, 1}}}), {"no_rope_layers", "4 entries"});
}

TEST(Smollm3Config, AWindowIsOfTheLayersWithoutPositions) {
  EXPECT_THAT(read_config(smollm3({{"sliding_window", 8}})).architecture.window,
              ElementsAre(std::nullopt, std::nullopt, std::nullopt, std::nullopt));
  const json windowed = smollm3({{"sliding_window", 8}, {"use_sliding_window", true}});
  EXPECT_THAT(read_config(windowed).architecture.window, ElementsAre(std::nullopt, std::nullopt, std::nullopt, 8));
  const json named = {"sliding_attention", "full_attention", "full_attention", "full_attention"};
  EXPECT_THAT(read_config(merged(windowed, {{"layer_types", named}})).architecture.window,
              ElementsAre(8, std::nullopt, std::nullopt, std::nullopt));
  expect_refused(smollm3({{"layer_types", named}}), {"sliding_window", "use_sliding_window"});
}

TEST(Smollm3Config, SmolLM3Of3BHasItsPublishedSize) {
  const DecoderParts parts = read_config(smollm3({{"num_hidden_layers", 36},
                                                  {"hidden_size", 2048},
                                                  {"intermediate_size", 11008},
                                                  {"num_attention_heads", 16},
                                                  {"vocab_size", 128256}}));
  EXPECT_EQ(sums_of(parts).parameters, 3'075'098'624);
  EXPECT_EQ(sums_of(parts).tensors, 326);
}

}  // namespace
}  // namespace longstraw::core::model
