#pragma once
// From rewards to advantages. r_i the reward of response i, or Σ_k w_k of its parts; a missing one takes no part in any mean
// or deviation, and a missing part none in that sum; s is the unbiased standard deviation.
//
//   grpo    A_i = (r_i - mean of the group) / (s + advantage_epsilon), s of the group or of the batch; `none`: no division
//   normalize_then_sum (GDPO)
//           z_k = (part_k - mean of the group) / (s_k of the group + advantage_epsilon),  q_i = Σ_k w_k z_k,
//           A_i = (q_i - mean of the batch) / (s of the batch + advantage_epsilon)
//   rloo    A_i = r_i - mean of the others of the group
//   reinforce_plus_plus_baseline
//           q_i = r_i - mean of the group,  A_i = (q_i - mean) / sqrt(s² + 1e-8), both over the counted tokens of the batch
//
// A group of equal rewards gives exactly 0 (q_i, in the last). With kl_in: reward, β Σ_t (lo - lr) m is taken off each r_i first.

#include "core/data/rollouts.h"
#include "core/model/step_gradient.h"
#include "core/objective/config.h"

#include <vector>

namespace longstraw::reference {

// [prompt][member]. A given advantage is used as it is, and the reward beside it is no part of any statistic; a missing
// reward gives 0. `scores`: of the batch at the weights of the step, read only for a KL in the reward of responses without
// old_logprobs. Throws ConfigError, naming the key, for what can't be computed from the batch.
std::vector<std::vector<double>> advantages(const core::data::Batch& batch, const core::objective::ObjectiveConfig& config,
                                            const core::model::TokenScores& scores = {});

// 1 where the token counts in the loss, else 0; one a token.
std::vector<double> token_mask(const core::data::Response& response);

}  // namespace longstraw::reference
