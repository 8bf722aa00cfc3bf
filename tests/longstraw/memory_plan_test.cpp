// The plan's peak against the peak that the allocator measures.
#include "longstraw/memory_plan.h"

#include "core/device/memory_meter.h"
#include "core/model/lora.h"
#include "longstraw/captured_prompt.h"
#include "longstraw/trainer.h"
#include "tests/support/families.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace longstraw {
namespace {

class CountAllocations : public testing::Environment {
 public:
  void SetUp() override {
    core::device::install_counting_allocator();
    at::set_num_threads(1);  // the peaks of several threads' work coincide or not
  }
};
const auto* const kCounting = testing::AddGlobalTestEnvironment(new CountAllocations);

// Large enough that tensors, not the 512-byte granule, decide.
nlohmann::json medium_config(const nlohmann::json& changes) {
  nlohmann::json config = test::tiny_config({{"hidden_size", 96},
                                             {"intermediate_size", 256},
                                             {"num_attention_heads", 6},
                                             {"num_key_value_heads", 2},
                                             {"head_dim", 16},
                                             {"num_hidden_layers", 6},
                                             {"vocab_size", 512}});
  config.merge_patch(changes);
  return config;
}

core::data::Batch batch_of(int64_t prompt_tokens, int64_t members, int64_t response_tokens) {
  core::data::Batch batch{test::random_group(512, prompt_tokens, std::vector<int64_t>(members, response_tokens), 9)};
  for (int64_t m = 0; m < members; ++m) batch[0].responses[m].reward = m % 2 ? 1.0 : 0.0;
  return batch;
}

struct Planned {
  const char* name;
  nlohmann::json model;
  at::ScalarType dtype;
  int64_t prompt, members, response;
  LongstrawConfig config;
};

TEST(MemoryPlan, PeakIsWithinFivePercentOfTheMeasuredOne) {
  const auto exact = PromptGradient::kExact, detached = PromptGradient::kDetached, tail = PromptGradient::kTail;
  const core::config::Bytes none{0}, some{48 << 20}, plenty{int64_t{4} << 30};
  const std::vector<Planned> cases{
      {"exact, recomputed", {}, at::kFloat, 1200, 4, 60, {exact, 0, 256, 1, none}},
      {"exact, some kept", {}, at::kFloat, 1200, 4, 60, {exact, 0, 128, 2, some}},
      {"exact, all kept", {}, at::kFloat, 1200, 4, 60, {exact, 0, 256, 4, plenty}},
      {"exact, one segment", {}, at::kFloat, 900, 2, 30, {exact, 0, 2048, 1, plenty}},
      {"exact, float64", {}, at::kDouble, 700, 4, 60, {exact, 0, 256, 1, none}},
      {"exact, bfloat16", {}, at::kBFloat16, 1200, 4, 60, {exact, 0, 256, 1, none}},
      {"exact, query and key norms", {{"model_type", "qwen3"}}, at::kFloat, 1200, 4, 60, {exact, 0, 256, 1, none}},
      {"tail", {}, at::kFloat, 1200, 4, 60, {tail, 300, 256, 1, none}},
      {"detached", {}, at::kFloat, 1200, 8, 120, {detached, 0, 256, 4, none}},
      {"window, detached",
       {{"model_type", "mistral"}, {"sliding_window", 100}},
       at::kFloat,
       3000,
       4,
       20,
       {detached, 0, 64, 1, none}},
      {"window, exact", {{"model_type", "mistral"}, {"sliding_window", 100}}, at::kFloat, 1200, 4, 60, {exact, 0, 256, 1, none}},
      {"long responses", {}, at::kFloat, 400, 2, 500, {exact, 0, 128, 1, none}},
  };
  for (const Planned& c : cases) {
    const auto decoder = test::tiny_decoder(medium_config(c.model.is_null() ? nlohmann::json::object() : c.model), c.dtype);
    const auto step = longstraw_gradient(*decoder, batch_of(c.prompt, c.members, c.response), {.longstraw = c.config});
    const double ratio = double(step.bytes.at("planned_peak_bytes")) / double(step.bytes.at("peak_bytes"));
    printf("    %-28s planned %6.2f MB, measured %6.2f MB, ratio %.3f; kept tokens %.0f\n", c.name,
           step.bytes.at("planned_peak_bytes") / 1e6, step.bytes.at("peak_bytes") / 1e6, ratio, step.facts.at("kept_tokens"));
    EXPECT_GE(ratio, 0.95) << c.name;
    EXPECT_LE(ratio, 1.05) << c.name;
  }
}

// Every kind of mixer, recomputed and kept. Small models' many small tensors round up to the allocator's granule.
TEST(MemoryPlan, PeakOfEveryFamilyIsWithinTenPercentOfTheMeasuredOne) {
  for (const auto& family : test::wide_families()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t budget : {int64_t{0}, int64_t{4} << 30}) {
        const auto decoder = test::tiny_decoder(family.config, dtype);
        core::data::Batch batch{test::random_group(96, 1500, {60, 60}, 9)};
        batch[0].responses[0].reward = 1.0;
        batch[0].responses[1].reward = 0.0;
        const auto step = longstraw_gradient(*decoder, batch, {.longstraw = {.segment_tokens = 256, .memory_budget = {budget}}});
        const double ratio = double(step.bytes.at("planned_peak_bytes")) / double(step.bytes.at("peak_bytes"));
        printf("    %-18s %-9s %s: planned %6.2f MB, measured %6.2f MB, ratio %.3f\n", family.name.c_str(), c10::toString(dtype),
               budget == 0 ? "recomputed" : "kept      ", step.bytes.at("planned_peak_bytes") / 1e6,
               step.bytes.at("peak_bytes") / 1e6, ratio);
        EXPECT_GE(ratio, 0.9) << family.name;
        EXPECT_LE(ratio, 1.1) << family.name;
      }
    }
  }
}

TEST(MemoryPlan, PeakDoesNotGrowWithTheGroup) {
  const auto decoder = test::tiny_decoder(medium_config(nlohmann::json::object()), at::kFloat);
  std::vector<int64_t> peaks;
  for (const int64_t members : {2, 4, 8, 16}) {
    const auto step =
        longstraw_gradient(*decoder, batch_of(1000, members, 40), {.longstraw = {.segment_tokens = 256, .memory_budget = {0}}});
    peaks.push_back(step.bytes.at("peak_bytes"));
  }
  printf("    peak bytes at G = 2, 4, 8, 16: %ld %ld %ld %ld\n", peaks[0], peaks[1], peaks[2], peaks[3]);
  EXPECT_LT(double(peaks.back()), 1.01 * double(peaks.front()));
}

// What lies behind the window of every layer is let go of, unless a sweep will need it.
TEST(MemoryPlan, AWindowedDetachedPromptNeedsNoMoreWhenLonger) {
  const auto decoder = test::tiny_decoder(medium_config({{"model_type", "mistral"}, {"sliding_window", 100}}), at::kFloat);
  const auto peak = [&](int64_t prompt, PromptGradient arm) {
    return longstraw_gradient(*decoder, batch_of(prompt, 2, 20),
                              {.longstraw = {.prompt_gradient = arm, .segment_tokens = 64, .memory_budget = {0}}})
        .bytes.at("peak_bytes");
  };
  // Prompts whose state is a whole number of segments: the last one is as long in both.
  EXPECT_LT(double(peak(4097, PromptGradient::kDetached)), 1.001 * double(peak(1025, PromptGradient::kDetached)));
  EXPECT_GT(double(peak(4097, PromptGradient::kExact)), 1.5 * double(peak(1025, PromptGradient::kExact)));
}

TEST(MemoryPlan, ABudgetIsKeptAndMoreOfItKeepsMore) {
  const auto decoder = test::tiny_decoder(medium_config(nlohmann::json::object()), at::kFloat);
  const core::data::Batch batch = batch_of(1200, 2, 20);
  double kept_before = -1.0;
  for (const int64_t budget : {int64_t{0}, int64_t{30} << 20, int64_t{50} << 20, int64_t{1} << 30}) {
    const auto step = longstraw_gradient(*decoder, batch, {.longstraw = {.segment_tokens = 100, .memory_budget = {budget}}});
    if (step.facts.at("kept_tokens") > 0) {
      EXPECT_LE(step.bytes.at("planned_peak_bytes"), budget);
    }
    EXPECT_GE(step.facts.at("kept_tokens"), kept_before);
    EXPECT_EQ(step.facts.at("kept_tokens") + step.facts.at("recomputed_tokens"), 1199);
    kept_before = step.facts.at("kept_tokens");
  }
  EXPECT_EQ(kept_before, 1199);
}

// A prompt that was captured before is part of what the step holds, and its kept graphs are.
TEST(MemoryPlan, OfACapturedPromptIsWithinTenPercentOfTheMeasuredPeak) {
  const auto decoder = test::tiny_decoder(medium_config(nlohmann::json::object()), at::kFloat);
  const core::data::Batch batch = batch_of(1200, 4, 60);
  for (const auto arm : {PromptGradient::kExact, PromptGradient::kDetached}) {
    for (const int64_t graph_budget : {int64_t{0}, int64_t{24} << 20, int64_t{4} << 30}) {
      const LongstrawConfig config{.prompt_gradient = arm, .segment_tokens = 128, .memory_budget = {0}};
      const core::device::MemoryMeter meter(at::kCPU);
      const int64_t before = meter.live_bytes();
      CapturedPrompt prompt(*decoder, batch[0].prompt_ids,
                            {.longstraw = config, .lengths = {1201, 1260}, .graph_budget = graph_budget});
      const int64_t held = meter.live_bytes() - before;
      EXPECT_NEAR(double(prompt.held_bytes()), double(held), 0.01 * double(held));
      EXPECT_LE(prompt.state_bytes(), captured_bytes(*decoder, 1200, config));
      int64_t kept_tokens = 0;
      for (const bool first : {true, false}) {
        const auto step = longstraw_gradient(*decoder, batch, {.longstraw = config, .captured = {&prompt}});
        const double ratio = double(step.bytes.at("planned_peak_bytes")) / double(step.bytes.at("peak_bytes"));
        printf("    %-8s budget %5.0f MB, %s use: planned %6.2f MB, measured %6.2f MB, ratio %.3f, kept %4.0f\n",
               std::string(core::config::name_of(arm)).c_str(), double(graph_budget) / 1e6, first ? "first" : "next ",
               double(step.bytes.at("planned_peak_bytes")) / 1e6, double(step.bytes.at("peak_bytes")) / 1e6, ratio,
               step.facts.at("kept_tokens"));
        EXPECT_GE(ratio, 0.9);
        EXPECT_LE(ratio, 1.1);
        if (first) kept_tokens = int64_t(step.facts.at("kept_tokens"));
        else EXPECT_EQ(step.facts.at("kept_tokens"), 0);
        if (kept_tokens > 0 && first) {
          EXPECT_LE(step.bytes.at("planned_peak_bytes"), graph_budget);
        }
      }
      EXPECT_EQ(kept_tokens > 0, arm == PromptGradient::kExact && graph_budget > 0);
      // Nothing is left of the uses but the state.
      EXPECT_NEAR(double(meter.live_bytes() - before), double(prompt.state_bytes()), 0.01 * double(prompt.state_bytes()));
    }
  }
}

TEST(MemoryPlan, WithAdaptersIsNoLessThanTheMeasuredPeak) {
  const auto decoder = test::tiny_decoder(medium_config(nlohmann::json::object()), at::kFloat);
  core::model::add_lora(*decoder, {.r = 8});
  for (const int64_t budget : {int64_t{0}, int64_t{4} << 30}) {
    const auto step =
        longstraw_gradient(*decoder, batch_of(1200, 4, 60), {.longstraw = {.segment_tokens = 256, .memory_budget = {budget}}});
    const int64_t planned = step.bytes.at("planned_peak_bytes"), measured = step.bytes.at("peak_bytes");
    printf("    adapters, %s: planned %6.2f MB, measured %6.2f MB\n", budget > 0 ? "kept" : "recomputed", planned / 1e6,
           measured / 1e6);
    EXPECT_GE(planned, measured);
    int64_t trained = 0;
    for (const auto& parameter : decoder->parameters()) trained += parameter->value.numel();
    EXPECT_EQ(step.bytes.at("gradient_bytes"), trained * 4);
  }
}

}  // namespace
}  // namespace longstraw
