#pragma once
// What every trainer returns for one optimizer step's batch: gradients and all that a record keeps beside them.

#include "core/model/traced_execution.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace longstraw::core::model {

// Log-probs and entropies of given responses under given weights; [prompt][member][token].
struct TokenScores {
  std::vector<std::vector<std::vector<double>>> logprobs;
  std::vector<std::vector<std::vector<double>>> entropies;
};

struct StepGradient {
  // Parallel to Decoder::parameters(), same shapes; float32, or float64 in a float64 run.
  std::vector<at::Tensor> gradients;
  double loss = 0.0;
  std::map<std::string, double> loss_parts;  // for example "policy", "kl"
  // [prompt][member][token], as the batch has them.
  std::vector<std::vector<std::vector<double>>> logprobs;
  // Entropy of the distribution each token was drawn from, likewise; empty unless it was asked for or the loss needs it.
  std::vector<std::vector<std::vector<double>>> entropies;
  std::vector<std::vector<double>> advantages;  // [prompt][member]
  // Of the forward pass that predicts the response, a number a token of it; [prompt][member], empty unless it was asked for.
  std::vector<std::vector<Trace>> traces;
  std::map<std::string, double> seconds;  // "total" and the arm's phases
  std::map<std::string, int64_t> bytes;   // "peak_bytes" above the weights, and the arm's categories
  std::map<std::string, double> facts;    // anything else worth recording, by name: segments, recompute_mismatches
};

}  // namespace longstraw::core::model
