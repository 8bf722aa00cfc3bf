#pragma once
// From final hidden states to losses and back, a slice of positions at a time: the logits [S, V] of a long response never
// exist at once. With p = softmax(z / τ), z = h Wᵀ:  dL/dz = (dL/dlp) (onehot(target) − p) / τ.

#include "longstraw/gradient_store.h"

#include "core/model/decoder.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace longstraw {

// Derivatives of the loss by the log-probs of rows [begin, begin + logprobs.size()).
using LossOfLogprobs = std::function<std::vector<double>(int64_t begin, const std::vector<double>& logprobs)>;

// Rows of logits that exist at once for a vocabulary of `vocab_size`.
int64_t logit_rows(int64_t vocab_size);

// hidden [S, D] after the final norm, targets int64 [S]. Calls `loss` for each slice in order. With a store, adds the
// output weight's gradient to it and returns dL/dhidden [S, D]; without one, returns an undefined tensor.
at::Tensor loss_head(const core::model::Decoder& decoder, const at::Tensor& hidden_SD, const at::Tensor& targets_S,
                     double temperature, const LossOfLogprobs& loss, GradientStore* gradients);

}  // namespace longstraw
