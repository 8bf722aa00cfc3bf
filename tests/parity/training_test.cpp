// Done-when of the training loop: after 20 optimizer steps on the same rollouts, the exact arm's parameters are the reference's.
#include "training/train.h"

#include "core/model/lora.h"
#include "tests/support/families.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

namespace longstraw::training {
namespace {

using core::model::Decoder;
using test::Family;

constexpr int64_t kSteps = 20;
constexpr double kBound = 1e-9;  // DESIGN 9

// One family of each kind.
std::vector<Family> kinds() {
  std::vector<Family> chosen;
  for (const Family& family : test::small_families()) {
    for (const char* name : {"llama", "mistral_sw", "glm4_moe", "qwen3_next", "deepseek_v32", "mamba2"}) {
      if (family.name == name) chosen.push_back(family);
    }
  }
  return chosen;
}

struct Trained {
  std::vector<at::Tensor> parameters;
  std::vector<nlohmann::json> metrics;
};

std::vector<nlohmann::json> lines_of(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

class TrainingParity : public ::testing::TestWithParam<Family> {
 protected:
  void SetUp() override {
    model_ = folder_.path() / "model";
    std::filesystem::create_directory(model_);
    test::write_checkpoint(model_, GetParam().config);
    const int64_t vocab = GetParam().config.at("vocab_size");
    core::data::Batch rollouts;
    for (uint64_t g = 0; g < 5; ++g) {
      auto& group = rollouts.emplace_back(test::random_group(vocab, 9 + 4 * int64_t(g), {4, 1, 6}, 100 + g));
      group.prompt_id = "prompt " + std::to_string(g);
      for (size_t m = 0; m < group.responses.size(); ++m) group.responses[m].reward = double((m + g) % 3) - 0.5;
    }
    core::data::write_rollouts(folder_.path() / "rollouts.jsonl", rollouts);
  }

  // Clipping is active with so narrow a range and so large a step; there is a KL term; every generation is used twice.
  Settings settings(Arm arm) const {
    Settings settings;
    settings.model.path = model_.string();
    settings.model.dtype = core::model::Dtype::kFloat64;
    settings.data.rollouts = (folder_.path() / "rollouts.jsonl").string();
    settings.objective.beta = 0.05;
    settings.objective.epsilon = 0.01;
    settings.optim.learning_rate = 1e-2;
    settings.optim.weight_decay = 0.1;
    settings.longstraw.segment_tokens = 6;
    settings.longstraw.replay_batch = 2;
    settings.train.arm = arm;
    settings.train.output_dir = (folder_.path() / ("run" + std::to_string(runs_++))).string();
    settings.train.prompts_per_step = 2;
    settings.train.steps_per_generation = 2;
    settings.train.num_iterations = 2;
    settings.train.max_steps = kSteps;
    settings.train.save_steps = 0;
    std::filesystem::create_directory(settings.train.output_dir);
    return settings;
  }

  static Trained run(const Settings& settings) {
    const Hooks hooks{.say = [](auto) {}, .progress = [](auto) {}, .should_stop = [] { return false; }};
    Data data = read_data(settings, hooks);
    const auto decoder = core::model::load_decoder(settings.model.path, at::kDouble, at::kCPU);
    if (settings.lora.wanted()) core::model::add_lora(*decoder, settings.lora);
    EXPECT_EQ(train(*decoder, data, settings, hooks).steps, kSteps);
    Trained trained;
    for (const auto& parameter : decoder->parameters()) trained.parameters.push_back(parameter->value.detach().clone());
    trained.metrics = lines_of(std::filesystem::path(settings.train.output_dir) / "metrics.jsonl");
    return trained;
  }

  // The largest relative L2 of a parameter.
  static double distance(const Trained& got, const Trained& wanted) {
    double worst = 0.0;
    for (size_t i = 0; i < got.parameters.size(); ++i) {
      const double norm = wanted.parameters[i].norm().item<double>();
      const double apart = (got.parameters[i] - wanted.parameters[i]).norm().item<double>();
      worst = std::max(worst, norm > 0.0 ? apart / norm : apart);
    }
    return worst;
  }

  static double most(const Trained& trained, const std::string& name) {
    double most = 0.0;
    for (const auto& line : trained.metrics) {
      if (line.contains(name)) most = std::max(most, line.at(name).get<double>());
    }
    return most;
  }

  test::TemporaryFolder folder_;
  std::filesystem::path model_;
  mutable int runs_ = 0;
};

TEST_P(TrainingParity, ParametersAfterTwentyStepsAreTheReferences) {
  const Trained reference = run(settings(Arm::kReference));
  EXPECT_GT(most(reference, "clip_ratio/region_mean"), 0.0) << "nothing is clipped";
  EXPECT_GT(most(reference, "kl"), 0.0) << "there is no KL term";
  EXPECT_LE(distance(run(settings(Arm::kExact)), reference), kBound);
}

TEST_P(TrainingParity, OtherMiniBatchesAndSegmentsToo) {
  Settings wanted = settings(Arm::kReference), got = settings(Arm::kExact);
  for (Settings* one : {&wanted, &got}) {
    one->train.steps_per_generation = 4;  // cuts through groups
    one->train.num_iterations = 1;
  }
  got.longstraw.segment_tokens = 64;
  got.longstraw.replay_batch = 1;
  EXPECT_LE(distance(run(got), run(wanted)), kBound);
}

TEST_P(TrainingParity, AdaptersToo) {
  Settings wanted = settings(Arm::kReference), got = settings(Arm::kExact);
  for (Settings* one : {&wanted, &got}) one->lora.r = 2;
  const Trained reference = run(wanted);
  EXPECT_LE(distance(run(got), reference), kBound);
  EXPECT_GT(most(reference, "kl"), 0.0) << "the frozen base is no reference model";
}

// What the tests above would let pass if they could not fail.
TEST_P(TrainingParity, DetachedParametersAreOthers) {
  EXPECT_GT(distance(run(settings(Arm::kDetached)), run(settings(Arm::kReference))), 1e3 * kBound);
}

INSTANTIATE_TEST_SUITE_P(Kinds, TrainingParity, ::testing::ValuesIn(kinds()), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace longstraw::training
