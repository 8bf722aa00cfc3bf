#pragma once
// Policy losses and weights of one response's tokens, [R], by the formulas of objective.h; numbers of masked tokens mean nothing.

#include "core/data/rollouts.h"
#include "core/objective/config.h"

#include <ATen/core/Tensor.h>

namespace longstraw::reference {

// c_t l_t. `counts_R`: bool, the completion mask. A loss of the whole response stands at each token.
at::Tensor policy_losses(const core::objective::ObjectiveConfig& config, const core::data::Response& response, double advantage,
                         const at::Tensor& counts_R, const at::Tensor& logprobs_R);

// The KL term, from the response's ref_logprobs; times the ratio where use_bias_correction_kl has it.
at::Tensor kl_losses(const core::objective::ObjectiveConfig& config, const core::data::Response& response,
                     const at::Tensor& counts_R, const at::Tensor& logprobs_R);

// A row of numbers as a tensor like another.
at::Tensor row_like(const std::vector<double>& values, const at::Tensor& like);

}  // namespace longstraw::reference
