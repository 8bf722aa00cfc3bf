// The reference's gradient against differences of its own loss: autograd and the objective together, with no oracle but
// the loss itself.
#include "reference/gradient.h"
#include "reference/objective.h"
#include "tests/support/closeness.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <cmath>

namespace longstraw {
namespace {

using core::data::Batch;
using core::model::Decoder;

Batch random_batch(uint64_t seed) {
  Batch batch{test::random_group(32, 9, {4, 2, 1}, seed), test::random_group(32, 5, {3, 6}, seed + 1)};
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

TEST(FiniteDifference, GradientIsTheSlopeOfTheLossInRandomDirections) {
  for (const char* model_type : {"llama", "qwen2", "qwen3"}) {
    SCOPED_TRACE(model_type);
    const auto decoder = test::tiny_decoder(
        test::tiny_config({{"model_type", model_type}, {"head_dim", 8}, {"tie_word_embeddings", true}}), at::kDouble);
    const Batch batch = random_batch(3);
    reference::ReferenceOptions options;
    options.objective.beta = 0.1;
    options.temperature = 0.8;
    const auto step = reference::reference_gradient(*decoder, batch, options);
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(5);
    for (int trial = 0; trial < 3; ++trial) {
      std::vector<at::Tensor> direction;
      double predicted = 0.0, square = 0.0;
      for (const auto& gradient : step.gradients) {
        direction.push_back(at::randn(gradient.sizes(), generator, gradient.options()));
        square += direction.back().square().sum().item<double>();
      }
      for (size_t i = 0; i < direction.size(); ++i) {
        direction[i] /= std::sqrt(square);
        predicted += (direction[i] * step.gradients[i]).sum().item<double>();
      }
      // Rounding of a loss of order 1 over a step of 1e-3: 1e-16 · 10 / 1e-3 = 1e-12; truncation 1e-12 · fifth
      // derivative / 30. Relative to the whole gradient, since a direction may be nearly at a right angle to it.
      double norm = 0.0;
      for (const auto& gradient : step.gradients) norm += gradient.square().sum().item<double>();
      const double measured = slope(*decoder, batch, options, direction, 1e-3);
      EXPECT_LE(std::abs(measured - predicted), 1e-8 * std::sqrt(norm));
      EXPECT_GT(std::abs(predicted), 1e-5 * std::sqrt(norm)) << "a direction that sees nothing";
    }
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
