// The loss head against autograd through log_softmax, and against finite differences: log-probs, entropies, both gradients.
#include "longstraw/loss_head.h"

#include "tests/support/closeness.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace longstraw {
namespace {

using core::model::Decoder;

struct Case {
  std::unique_ptr<Decoder> decoder;
  at::Tensor hidden_SD, targets_S;
  std::vector<double> by_logprob, by_entropy;
  double temperature = 0.7;
};

Case make_case(int64_t vocab, int64_t rows, at::ScalarType dtype) {
  Case c{.decoder = test::tiny_decoder(test::tiny_config({{"vocab_size", vocab}}), dtype)};
  at::manual_seed(5);
  // Wide enough that the distributions are neither flat nor a point.
  c.hidden_SD = at::randn({rows, 16}, dtype).mul_(2.0);
  c.targets_S = at::randint(vocab, {rows}, at::kLong);
  const at::Tensor draws = at::randn({2, rows}, at::kDouble);
  for (int64_t i = 0; i < rows; ++i) {
    c.by_logprob.push_back(draws[0][i].item<double>());
    c.by_entropy.push_back(draws[1][i].item<double>());
  }
  c.by_logprob[0] = c.by_entropy[1] = 0.0;
  return c;
}

std::vector<double> part(const std::vector<double>& of, int64_t begin, size_t n) {
  return {of.begin() + begin, of.begin() + begin + static_cast<std::ptrdiff_t>(n)};
}

struct Found {
  at::Tensor grad_hidden, grad_weight;
  std::vector<double> logprobs, entropies;
  std::vector<int64_t> begins;
};

Found run(const Case& c, bool entropy, bool entropy_gradient) {
  Found found;
  GradientStore store(*c.decoder);
  const auto loss = [&](int64_t begin, const std::vector<double>& logprobs, const std::vector<double>& entropies) {
    found.begins.push_back(begin);
    found.logprobs.insert(found.logprobs.end(), logprobs.begin(), logprobs.end());
    found.entropies.insert(found.entropies.end(), entropies.begin(), entropies.end());
    return RowDerivatives{part(c.by_logprob, begin, logprobs.size()),
                          entropy_gradient ? part(c.by_entropy, begin, logprobs.size()) : std::vector<double>()};
  };
  found.grad_hidden =
      loss_head(*c.decoder, c.hidden_SD, c.targets_S, {.temperature = c.temperature, .entropy = entropy}, loss, &store);
  found.grad_weight = store.of(c.decoder->output_weight()).clone();
  return found;
}

at::Tensor column(const std::vector<double>& values) { return at::tensor(values, at::kDouble); }

struct Wanted {
  at::Tensor logprobs, entropies, loss;
};

// In float64, all rows at once.
Wanted textbook(const Case& c, const at::Tensor& hidden_SD, const at::Tensor& weight_VD) {
  const at::Tensor log_probs = at::log_softmax(at::mm(hidden_SD, weight_VD.t()) / c.temperature, 1);
  Wanted wanted{log_probs.gather(1, c.targets_S.unsqueeze(1)).squeeze(1), (log_probs.exp() * log_probs).sum({1}).neg(), {}};
  wanted.loss = (wanted.logprobs * column(c.by_logprob)).sum() + (wanted.entropies * column(c.by_entropy)).sum();
  return wanted;
}

// `roundings` of float64: the longest sums are over the vocabulary.
void expect_textbook(const Case& c, double bound) {
  const Found found = run(c, true, true);
  const at::Tensor hidden = c.hidden_SD.to(at::kDouble).requires_grad_(true);
  const at::Tensor weight = c.decoder->output_weight().value.detach().to(at::kDouble).requires_grad_(true);
  const Wanted wanted = textbook(c, hidden, weight);
  wanted.loss.backward();
  EXPECT_LE(test::relative_l2(column(found.logprobs), wanted.logprobs.detach()), bound);
  EXPECT_LE(test::relative_l2(column(found.entropies), wanted.entropies.detach()), bound);
  EXPECT_LE(test::relative_l2(found.grad_hidden, hidden.grad()), bound);
  EXPECT_LE(test::relative_l2(found.grad_weight, weight.grad()), bound);
}

// Sums of V (and D) terms of relative error u·sqrt(V), and 4 for what cancels in them, as closeness.h has it.
double bound_of(int64_t vocab, double epsilon) { return 4.0 * epsilon * std::sqrt(double(vocab) + 16.0); }

TEST(LossHead, IsTheTextbooksInFloat64) { expect_textbook(make_case(32, 20, at::kDouble), bound_of(32, 1.2e-16)); }

TEST(LossHead, IsTheTextbooksOverSeveralSlices) {
  constexpr int64_t kVocab = 200'000;
  const Case c = make_case(kVocab, 100, at::kDouble);
  EXPECT_THAT(run(c, true, true).begins, testing::ElementsAre(0, logit_rows(kVocab)));
  expect_textbook(c, bound_of(kVocab, 1.2e-16));
}

TEST(LossHead, IsTheTextbooksInFloat32ToItsRounding) { expect_textbook(make_case(500, 40, at::kFloat), bound_of(500, 6e-8)); }

TEST(LossHead, GradientIsTheDifferenceOfTheLoss) {
  const Case c = make_case(32, 3, at::kDouble);
  const Found found = run(c, true, true);
  const at::Tensor weight = c.decoder->output_weight().value.detach();
  constexpr double kMove = 1e-5;  // error h²/6 |f'''|, with f''' up to 50 at this temperature, and 1e-15 / h
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t d = 0; d < 16; ++d) {
      const auto moved = [&](double by) {
        at::Tensor hidden = c.hidden_SD.clone();
        hidden[row][d] += by;
        return textbook(c, hidden, weight).loss.item<double>();
      };
      const double numeric = (moved(kMove) - moved(-kMove)) / (2 * kMove);
      EXPECT_NEAR(found.grad_hidden[row][d].item<double>(), numeric, 2e-9);
    }
  }
}

TEST(LossHead, AskingForEntropiesChangesNoBitOfTheRest) {
  const Case c = make_case(100, 20, at::kFloat);
  const Found plain = run(c, false, false), asked = run(c, true, false);
  EXPECT_TRUE(plain.entropies.empty());
  EXPECT_EQ(asked.entropies.size(), 20u);
  EXPECT_EQ(plain.logprobs, asked.logprobs);
  EXPECT_TRUE(at::equal(plain.grad_hidden, asked.grad_hidden));
  EXPECT_TRUE(at::equal(plain.grad_weight, asked.grad_weight));
  // The check can fail: with their gradient the rest differs.
  EXPECT_FALSE(at::equal(plain.grad_hidden, run(c, true, true).grad_hidden));
}

TEST(LossHead, EntropiesComeWithoutAGradientToo) {
  const Case c = make_case(100, 20, at::kFloat);
  std::vector<double> entropies;
  const auto loss = [&](int64_t, const std::vector<double>&, const std::vector<double>& of) {
    entropies.insert(entropies.end(), of.begin(), of.end());
    return RowDerivatives{};
  };
  const at::Tensor none = loss_head(*c.decoder, c.hidden_SD, c.targets_S, {.temperature = 0.7, .entropy = true}, loss, nullptr);
  EXPECT_FALSE(none.defined());
  EXPECT_EQ(entropies, run(c, true, true).entropies);
}

}  // namespace
}  // namespace longstraw
