// The optimizer against torch.optim in Python, transformers' schedules and PyTorch's clipping (fixtures/make_optim_golden.py), and
// what a continued run rests on: its state, bit for bit.
#include "core/optim/optimizer.h"

#include "core/base/errors.h"
#include "core/device/device.h"
#include "tests/support/closeness.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>

namespace longstraw::core::optim {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

const std::filesystem::path kFixtures = "fixtures/optim";

nlohmann::json read_cases() { return nlohmann::json::parse(std::ifstream(kFixtures / "cases.json")); }

template <class Enum>
Enum named(const std::string& name) {
  for (const auto& entry : names_of(Enum{})) {
    if (entry.name == name) return entry.value;
  }
  throw std::logic_error(name);
}

OptimConfig config_of(const nlohmann::json& c) {
  OptimConfig config;
  config.optim = named<OptimizerName>(c.at("optim"));
  config.learning_rate = c.at("learning_rate");
  config.lr_scheduler_type = named<Schedule>(c.at("lr_scheduler_type"));
  config.warmup_steps = c.value("warmup_steps", config.warmup_steps);
  config.weight_decay = c.value("weight_decay", config.weight_decay);
  config.adam_beta1 = c.value("adam_beta1", config.adam_beta1);
  config.adam_beta2 = c.value("adam_beta2", config.adam_beta2);
  config.adam_epsilon = c.value("adam_epsilon", config.adam_epsilon);
  config.sgd_momentum = c.value("sgd_momentum", config.sgd_momentum);
  config.max_grad_norm = c.at("max_grad_norm");
  return config;
}

std::unique_ptr<model::Decoder> decoder_of(const std::string& variant, const std::string& dtype) {
  return model::load_decoder(test::golden_folder(variant), device::parse_dtype(dtype), at::kCPU);
}

// The fixture's formula; `number` is the parameter's among all by name.
at::Tensor gradient(std::int64_t number, std::int64_t step, const at::Tensor& weight) {
  const auto i = at::arange(weight.numel(), at::kLong);
  const auto whole = (i * 7919 + (104729 * step + 1299709 * number)).remainder(20011) - 10005;
  const auto wide = device::accumulation_dtype(weight.scalar_type());
  return (whole.to(at::kDouble) / 4096 / std::exp2(step % 7)).to(wide).reshape(weight.sizes());
}

std::vector<at::Tensor> gradients(const model::Decoder& decoder, std::int64_t step) {
  std::vector<std::string> names;
  for (const auto& parameter : decoder.parameters()) names.push_back(parameter->name);
  std::sort(names.begin(), names.end());
  std::vector<at::Tensor> result;
  for (const auto& parameter : decoder.parameters()) {
    const auto number = std::lower_bound(names.begin(), names.end(), parameter->name) - names.begin();
    result.push_back(gradient(number, step, parameter->value));
  }
  return result;
}

double epsilon(const std::string& dtype) {
  return dtype == "float64" ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
}

// The case's steps with `config`, whose reports `check` sees; the masters, or the weights where they are their own.
std::map<std::string, at::Tensor> weights_after(const nlohmann::json& c, const OptimConfig& config,
                                                const std::function<void(std::int64_t, const StepReport&)>& check = {}) {
  const auto decoder = decoder_of(c.at("model"), c.at("dtype"));
  const auto steps = static_cast<std::int64_t>(c.at("learning_rate").size());
  Optimizer optimizer(*decoder, config, steps);
  for (std::int64_t step = 0; step < steps; ++step) {
    const auto report = optimizer.step(gradients(*decoder, step));
    if (check) check(step, report);
  }
  const auto state = optimizer.state();
  std::map<std::string, at::Tensor> result;
  for (const auto& parameter : decoder->parameters()) {
    const auto master = state.find("masters/" + parameter->name);
    EXPECT_EQ(master != state.end(), decoder->dtype() == at::kBFloat16);
    result[parameter->name] = master != state.end() ? master->second : parameter->value.detach();
    if (master != state.end()) {
      EXPECT_TRUE(at::equal(parameter->value, master->second.to(at::kBFloat16))) << parameter->name;
    }
  }
  return result;
}

double largest_error(const std::map<std::string, at::Tensor>& got, const std::string& name) {
  const auto wanted = test::read_tensors(kFixtures / (name + ".safetensors"));
  EXPECT_EQ(wanted.size(), got.size());
  double largest = 0.0;
  for (const auto& [parameter, value] : wanted) largest = std::max(largest, test::relative_l2(got.at(parameter), value));
  return largest;
}

// Both round each step's weights once, half an epsilon, and seldom to different sides: 20 epsilons would be every time. Moments
// that differ in their last bit (lerp in Python) shift a step by an epsilon of the step.
double bound_of(const std::string& dtype) { return dtype == "float64" ? 1e-15 : 20 * epsilon(dtype); }

TEST(Optimizer, TwentyStepsAreThoseOfTorchAndTransformers) {
  const auto cases = read_cases().at("cases");
  EXPECT_GE(cases.size(), 6U);
  for (const auto& [name, c] : cases.items()) {
    SCOPED_TRACE(name);
    const std::string dtype = c.at("dtype");
    ASSERT_EQ(c.at("learning_rate").size(), 20U);
    const auto got = weights_after(c, config_of(c.at("optim")), [&, &c = c](std::int64_t step, const StepReport& report) {
      EXPECT_EQ(report.learning_rate, c.at("learning_rate")[step].get<double>()) << step;
      // PyTorch sums in the gradients' dtype and ours in float64; the tree of its sum is at most some dozens of roundings deep.
      const double wanted = c.at("grad_norm")[step];
      EXPECT_NEAR(report.grad_norm, wanted, 32 * epsilon(dtype) * wanted) << step;
    });
    const double error = largest_error(got, name);
    EXPECT_LE(error, bound_of(dtype));
    RecordProperty(name, fmt::format("{:.1e}", error));
  }
}

TEST(Optimizer, TheComparisonSeesASmallChangeOfAnySetting) {
  const auto cases = read_cases().at("cases");
  const auto error = [&](const std::string& name, const std::function<void(OptimConfig&)>& change) {
    OptimConfig config = config_of(cases.at(name).at("optim"));
    change(config);
    return largest_error(weights_after(cases.at(name), config), name);
  };
  const double seen = 1e3 * bound_of("float64");
  EXPECT_GT(error("adamw_linear", [](auto& c) { c.learning_rate *= 1 + 1e-6; }), seen);
  EXPECT_GT(error("adamw_linear", [](auto& c) { c.weight_decay *= 1 + 1e-6; }), seen);
  EXPECT_GT(error("adamw_linear", [](auto& c) { c.adam_beta1 -= 1e-6; }), seen);
  EXPECT_GT(error("adamw_linear", [](auto& c) { c.adam_beta2 -= 1e-6; }), seen);
  EXPECT_GT(error("adamw_linear", [](auto& c) { c.warmup_steps += 1; }), seen);
  EXPECT_GT(error("adamw_linear", [](auto& c) { c.max_grad_norm *= 1 + 1e-6; }), seen);
  EXPECT_GT(error("adamw_cosine", [](auto& c) { c.adam_epsilon *= 2; }), seen);
  EXPECT_GT(error("adamw_cosine", [](auto& c) { c.lr_scheduler_type = Schedule::kLinear; }), seen);
  EXPECT_GT(error("sgd_momentum", [](auto& c) { c.sgd_momentum -= 1e-6; }), seen);
  EXPECT_GT(error("sgd_momentum", [](auto& c) { c.weight_decay *= 1 + 1e-6; }), seen);
}

TEST(Optimizer, DecaysWhatTransformersDecays) {
  const auto cases = read_cases();
  EXPECT_GT(cases.at("spared").size(), 20U);
  for (const std::string name : cases.at("decayed")) EXPECT_TRUE(is_decayed(name)) << name;
  for (const std::string name : cases.at("spared")) EXPECT_FALSE(is_decayed(name)) << name;
  EXPECT_TRUE(is_decayed("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"));
}

TEST(Optimizer, SmallStepsAreKeptThoughBfloat16WouldRoundThemAway) {
  const auto decoder = decoder_of("qwen3_bfloat16", "bfloat16");
  const auto& weight = decoder->parameters()[0]->value;
  const at::Tensor start = weight.detach().clone();
  // One step is 1/20 of the distance between two bfloat16 numbers near 1 (2^-8 below 1), and rounds away alone.
  OptimConfig config{
      .optim = OptimizerName::kSgd, .learning_rate = 1.0, .lr_scheduler_type = Schedule::kConstant, .max_grad_norm = 0.0};
  weight.detach().fill_(0.75);
  Optimizer optimizer(*decoder, config, 40);
  const auto step = [&] {
    std::vector<at::Tensor> small;
    for (const auto& parameter : decoder->parameters()) {
      small.push_back(at::full(parameter->value.sizes(), std::exp2(-8) / 20, at::kFloat));
    }
    optimizer.step(small);
  };
  step();
  EXPECT_EQ(weight.detach().to(at::kFloat).max().item<float>(), 0.75F);
  for (int i = 1; i < 40; ++i) step();
  EXPECT_EQ(weight.detach().to(at::kFloat).max().item<float>(), 0.75F - 2 * 0.00390625F);
}

// Every optimizer and dtype that keeps something else.
struct Kept {
  const char* variant;
  const char* dtype;
  OptimConfig config;
};
std::vector<Kept> all_kept() {
  const OptimConfig adam{.learning_rate = 1e-2, .warmup_steps = 3, .weight_decay = 0.1, .max_grad_norm = 10.0};
  const OptimConfig sgd{.optim = OptimizerName::kSgd, .learning_rate = 1e-2, .sgd_momentum = 0.9};
  const OptimConfig plain{.optim = OptimizerName::kSgd, .learning_rate = 1e-2};
  return {{"llama_bias", "float64", adam},
          {"llama_bias", "float32", sgd},
          {"qwen3_bfloat16", "bfloat16", adam},
          {"qwen3_bfloat16", "bfloat16", plain}};
}

std::map<std::string, at::Tensor> copied(std::map<std::string, at::Tensor> state) {
  for (auto& [name, value] : state) value = value.clone();
  return state;
}

TEST(Optimizer, ContinuesFromItsStateBitForBit) {
  for (const Kept& kept : all_kept()) {
    for (const std::int64_t stop : {0, 1, 6}) {
      const auto whole = decoder_of(kept.variant, kept.dtype), first = decoder_of(kept.variant, kept.dtype);
      const auto second = decoder_of(kept.variant, kept.dtype);
      Optimizer straight(*whole, kept.config, 12), before(*first, kept.config, 12);
      for (std::int64_t step = 0; step < 12; ++step) straight.step(gradients(*whole, step));
      for (std::int64_t step = 0; step < stop; ++step) before.step(gradients(*first, step));

      Optimizer after(*second, kept.config, 12);
      after.step(gradients(*second, 3));  // what it had is forgotten
      const bool masters = first->dtype() == at::kBFloat16;
      for (size_t i = 0; !masters && i < first->parameters().size(); ++i) {
        second->parameters()[i]->value.detach().copy_(first->parameters()[i]->value);
      }
      after.load_state(copied(before.state()), before.steps());
      EXPECT_EQ(after.steps(), stop);
      for (std::int64_t step = stop; step < 12; ++step) after.step(gradients(*second, step));
      for (size_t i = 0; i < whole->parameters().size(); ++i) {
        EXPECT_TRUE(at::equal(second->parameters()[i]->value, whole->parameters()[i]->value)) << whole->parameters()[i]->name;
      }
      const auto wanted = straight.state(), got = after.state();
      ASSERT_EQ(got.size(), wanted.size());
      for (const auto& [name, value] : wanted) EXPECT_TRUE(at::equal(got.at(name), value)) << name;
    }
  }
}

TEST(Optimizer, RefusesAStateThatDoesNotFitAndStaysAsItWas) {
  const auto decoder = decoder_of("qwen3_bfloat16", "bfloat16");
  const OptimConfig config{.learning_rate = 1e-2};
  Optimizer optimizer(*decoder, config, 10);
  optimizer.step(gradients(*decoder, 0));
  const auto state = copied(optimizer.state());
  const auto refuses = [&](const std::function<void(std::map<std::string, at::Tensor>&)>& change, const char* message) {
    auto changed = state;
    change(changed);
    EXPECT_THAT([&] { optimizer.load_state(changed, 1); }, ThrowsMessage<FormatError>(HasSubstr(message)));
  };
  const std::string norm = "model.norm.weight";
  refuses([&](auto& s) { s.erase("exp_avg/" + norm); }, "exp_avg/model.norm.weight: missing, wanted [16] of Float");
  refuses([&](auto& s) { s["momentum_buffer/" + norm] = at::zeros({16}); }, "momentum_buffer/model.norm.weight");
  refuses([&](auto& s) { s["masters/" + norm] = at::zeros({15}); },
          "masters/model.norm.weight: [15] of Float, wanted [16] of Float");
  refuses([&](auto& s) { s["exp_avg_sq/" + norm] = at::zeros({16}, at::kDouble); }, "[16] of Double, wanted [16] of Float");
  const auto now = optimizer.state();
  for (const auto& [name, value] : state) EXPECT_TRUE(at::equal(now.at(name), value)) << name;
}

TEST(Optimizer, RaisesTheVersionOfEveryWeight) {
  for (const Kept& kept : all_kept()) {
    const auto decoder = decoder_of(kept.variant, kept.dtype);
    Optimizer optimizer(*decoder, kept.config, 10);
    std::vector<at::Tensor> before;
    std::vector<uint64_t> versions;
    for (const auto& parameter : decoder->parameters()) {
      before.push_back(parameter->value);
      versions.push_back(parameter->value._version());
    }
    optimizer.step(gradients(*decoder, 0));
    for (size_t i = 0; i < before.size(); ++i) {
      const at::Tensor& value = decoder->parameters()[i]->value;
      EXPECT_TRUE(value.is_same(before[i]));
      EXPECT_GT(value._version(), versions[i]) << decoder->parameters()[i]->name;
      EXPECT_FALSE(value.grad().defined());
      EXPECT_TRUE(value.requires_grad());
    }
  }
}

TEST(Optimizer, RefusesABetaOfOne) {
  const auto decoder = decoder_of("llama_bias", "float32");
  EXPECT_THAT([&] { Optimizer(*decoder, {.adam_beta2 = 1.0}, 10); }, ThrowsMessage<ConfigError>(HasSubstr("adam_beta2")));
  EXPECT_NO_THROW(Optimizer(*decoder, {.optim = OptimizerName::kSgd, .adam_beta2 = 1.0}, 10));
}

TEST(GlobalNorm, IsOfFloat64WhateverTheThreads) {
  at::manual_seed(5);
  const auto large = at::randn({3, 100'003}), small = at::randn({7}).mul_(1e-3);
  const double wanted = at::cat({large.flatten(), small}).to(at::kDouble).norm().item<double>();
  const int threads = at::get_num_threads();
  const double first = global_norm({large, small});
  // 3e5 squares in float64; in float32 the error would be near 1e-7.
  EXPECT_NEAR(first, wanted, 1e-13 * wanted);
  at::set_num_threads(threads == 1 ? 2 : 1);
  EXPECT_EQ(global_norm({large, small}), first);
  at::set_num_threads(threads);
  EXPECT_EQ(global_norm({large.t()}), global_norm({large.t().contiguous()}));
  EXPECT_EQ(global_norm({}), 0.0);
}

TEST(FirstNonFinite, NamesParameterAndPlace) {
  const auto decoder = decoder_of("llama_bias", "float32");
  auto values = gradients(*decoder, 0);
  EXPECT_FALSE(first_non_finite(*decoder, values).has_value());
  values[5].view(-1)[7] = std::numeric_limits<float>::infinity();
  values[5].view(-1)[9] = std::numeric_limits<float>::quiet_NaN();
  values[8].view(-1)[0] = std::numeric_limits<float>::quiet_NaN();
  const auto found = first_non_finite(*decoder, values);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->parameter, decoder->parameters()[5]->name);
  EXPECT_EQ(found->index, 7);
  EXPECT_TRUE(std::isinf(found->value));
}

}  // namespace
}  // namespace longstraw::core::optim
