#pragma once
// From final hidden states to losses and back, a slice of positions at a time: the logits [S, V] of a long response never
// exist at once. With p = softmax(z / τ), z = h Wᵀ, H = −Σ p log p:
//   dlp/dz = (onehot(target) − p) / τ,   dH/dz_j = −p_j (log p_j + H) / τ

#include "longstraw/gradient_store.h"

#include "core/model/decoder.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace longstraw {

// Derivatives of the loss by the rows' log-probs, and by their entropies (empty: all 0).
struct RowDerivatives {
  std::vector<double> by_logprob;
  std::vector<double> by_entropy;
};
// Of rows [begin, begin + logprobs.size()); `entropies` is empty unless they were asked for.
using LossOfRows =
    std::function<RowDerivatives(int64_t begin, const std::vector<double>& logprobs, const std::vector<double>& entropies)>;

struct LossHeadOptions {
  double temperature = 1.0;
  bool entropy = false;
};

// Rows of logits that exist at once for a vocabulary of `vocab_size`.
int64_t logit_rows(int64_t vocab_size);

// hidden [S, D] after the final norm, targets int64 [S]. Calls `loss` for each slice in order. With a store, adds the
// output weight's gradient to it and returns dL/dhidden [S, D]; without one, returns an undefined tensor.
at::Tensor loss_head(const core::model::Decoder& decoder, const at::Tensor& hidden_SD, const at::Tensor& targets_S,
                     const LossHeadOptions& options, const LossOfRows& loss, GradientStore* gradients);

}  // namespace longstraw
