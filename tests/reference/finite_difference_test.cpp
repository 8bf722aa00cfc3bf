// The reference's gradient against differences of its own loss: autograd and the objective together, with no oracle but
// the loss itself.
#include "core/config/load.h"
#include "reference/gradient.h"
#include "reference/objective.h"
#include "tests/support/closeness.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

namespace longstraw {
namespace {

using core::data::Batch;
using core::model::Decoder;

Batch random_batch(uint64_t seed, int64_t vocab = 32) {
  Batch batch{test::random_group(vocab, 9, {4, 2, 1}, seed), test::random_group(vocab, 5, {3, 6}, seed + 1)};
  double reward = 0.3;
  for (auto& group : batch) {
    for (auto& response : group.responses) {
      response.reward = reward = std::fmod(reward * 7.3, 2.0);
      // Away from the current log-probs, so that some ratios are clipped and none sits on a corner of the loss.
      response.old_logprobs.emplace();
      response.ref_logprobs.emplace();
      for (size_t t = 0; t < response.completion_ids.size(); ++t) {
        response.old_logprobs->push_back(-3.0 - 0.37 * double(t));
        response.ref_logprobs->push_back(-3.2 + 0.21 * double(t));
      }
    }
  }
  return batch;
}

// Moves every parameter by step · direction and back when it goes out of scope.
class Moved {
 public:
  Moved(const Decoder& decoder, const std::vector<at::Tensor>& direction, double step) : decoder_(decoder) {
    const at::NoGradGuard guard;
    for (size_t i = 0; i < direction.size(); ++i) {
      kept_.push_back(decoder.parameters()[i]->value.clone());
      decoder.parameters()[i]->value.add_(direction[i], step);
    }
  }
  ~Moved() {
    const at::NoGradGuard guard;
    for (size_t i = 0; i < kept_.size(); ++i) decoder_.parameters()[i]->value.copy_(kept_[i]);
  }

 private:
  const Decoder& decoder_;
  std::vector<at::Tensor> kept_;
};

double slope(const Decoder& decoder, const Batch& batch, const reference::ReferenceOptions& options,
             const std::vector<at::Tensor>& direction, double step) {
  const auto loss_at = [&](double where) {
    const Moved moved(decoder, direction, where);
    return reference::reference_gradient(decoder, batch, options).loss;
  };
  // Fourth order: the error is step⁴ times a fifth derivative, beside the rounding of the loss divided by the step.
  return (8 * (loss_at(step) - loss_at(-step)) - (loss_at(2 * step) - loss_at(-2 * step))) / (12 * step);
}

// Choices of experts and keys are constants of the gradient, so a step must not change them: small enough for that, and the
// rounding of a loss of order 1 over it is 1e-16 · 10 / 1e-4 = 1e-11; truncation is 1e-16 times a fifth derivative / 30.
// Relative to the whole gradient, of order 0.1 to 10, since a direction may be nearly at a right angle to it.
constexpr double kStep = 1e-4, kBound = 1e-10;

reference::ReferenceOptions clipped_with_kl() {
  reference::ReferenceOptions options;
  options.objective.beta = 0.1;
  options.temperature = 0.8;
  return options;
}

void expect_slopes(const Decoder& decoder, const Batch& batch, const reference::ReferenceOptions& options) {
  const auto step = reference::reference_gradient(decoder, batch, options);
  double norm = 0.0;
  for (const auto& gradient : step.gradients) norm = std::hypot(norm, gradient.norm().item<double>());
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(5);
  double worst = 0.0;
  for (int trial = 0; trial < 3; ++trial) {
    std::vector<at::Tensor> direction;
    double predicted = 0.0, length = 0.0;
    for (const auto& gradient : step.gradients) {
      direction.push_back(at::randn(gradient.sizes(), generator, gradient.options()));
      length = std::hypot(length, direction.back().norm().item<double>());
    }
    for (size_t i = 0; i < direction.size(); ++i) {
      direction[i] /= length;
      predicted += (direction[i] * step.gradients[i]).sum().item<double>();
    }
    const double error = std::abs(slope(decoder, batch, options, direction, kStep) - predicted) / norm;
    worst = std::max(worst, error);
    EXPECT_LE(error, kBound);
    EXPECT_GT(std::abs(predicted), 1e-5 * norm) << "a direction that sees nothing";
  }
  printf("    %-18s %.1e of the gradient's norm\n", decoder.architecture().model_type.c_str(), worst);
}

TEST(FiniteDifference, GradientIsTheSlopeOfTheLossInRandomDirections) {
  for (const char* model_type : {"llama", "qwen2", "qwen3"}) {
    SCOPED_TRACE(model_type);
    const auto decoder = test::tiny_decoder(
        test::tiny_config({{"model_type", model_type}, {"head_dim", 8}, {"tie_word_embeddings", true}}), at::kDouble);
    expect_slopes(*decoder, random_batch(3), clipped_with_kl());
  }
}

class FiniteDifferenceOfFamily : public testing::TestWithParam<std::string> {};

TEST_P(FiniteDifferenceOfFamily, GradientIsTheSlopeOfTheLossInRandomDirections) {
  const auto decoder = core::model::load_decoder(test::golden_folder(GetParam()), at::kDouble, at::kCPU);
  expect_slopes(*decoder, random_batch(3, decoder->architecture().vocab), clipped_with_kl());
}

INSTANTIATE_TEST_SUITE_P(Families, FiniteDifferenceOfFamily, testing::ValuesIn(test::golden_families()),
                         [](const auto& info) { return info.param; });

// Those of which the gradient is a slope: cispo's is not, its ratio being a constant.
TEST(FiniteDifference, EveryKindOfObjectiveHasItsSlope) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  Batch batch = random_batch(3);
  for (auto& group : batch) {
    for (auto& response : group.responses) {
      for (size_t t = 0; t < response.completion_ids.size(); ++t) {
        (*response.old_logprobs)[t] = -3.4 - 0.02 * double(t);  // nearer, for ratios of whole responses
      }
      response.completion_mask.emplace(response.completion_ids.size(), 1);
    }
  }
  (*batch[1].responses[1].completion_mask)[2] = 0;
  for (const char* objective :
       {"{loss_type: gspo, entropy_coef: 0.3}", "{loss_type: gmpo, dialect: verl, kl: k2, beta: 0.1}", "{loss_type: rloo}",
        "{loss_type: sapo, importance_sampling_level: sequence, dialect: verl, entropy_coef: 0.3}",
        "{loss_type: dr_grpo, top_entropy_quantile: 0.4, entropy_coef: 0.3}", "{loss_type: reinforce, kl_in: reward, beta: 0.1}"}) {
    SCOPED_TRACE(objective);
    reference::ReferenceOptions options;
    options.objective = core::config::load_text<core::objective::ObjectiveConfig>(objective, "objective");
    options.max_completion_length = 8;
    expect_slopes(*decoder, batch, options);
  }
}

TEST(FiniteDifference, TheDetachedGradientIsNotTheSlope) {
  const auto decoder = test::tiny_decoder(test::tiny_config(), at::kDouble);
  const Batch batch = random_batch(3);
  reference::ReferenceOptions options;
  const auto full = reference::reference_gradient(*decoder, batch, options);
  options.run.tail_tokens = 0;
  const auto detached = reference::reference_gradient(*decoder, batch, options);
  EXPECT_DOUBLE_EQ(full.loss, detached.loss) << "a cut changes no value";
  EXPECT_GT(test::gradient_error(*decoder, detached.gradients, full.gradients).whole, 1e-2);
}

}  // namespace
}  // namespace longstraw
