#pragma once
// Mixture of experts: a router chooses k of E experts for each token,
//   out = Σ_j w_j · expert_{e_j}(x)  [+ shared(x)]  [or + sigmoid(v · x) · shared(x)],
// expert(x) = down(silu(gate x) ⊙ up x), or down(act(up x)) where it has no gate. Choices are constants: gradients reach
// the router through the weights of the chosen experts only.

#include "core/model/block.h"
#include "core/model/blocks/mlp.h"

#include <memory>
#include <string>

namespace longstraw::core::model {

// From router logits z = W x to chosen experts and their weights.
//   kSoftmax          p = softmax(z) over all experts, choice by p, weight p: Qwen
//   kSigmoid          s = sigmoid(z), choice by s + correction, weight s: DeepSeek, GLM, Nemotron-H
//   kSoftmaxOfChosen  choice by z, weights softmax over the chosen z: Granite
struct Routing {
  enum class Scores { kSoftmax, kSigmoid, kSoftmaxOfChosen } scores = Scores::kSoftmax;
  // Logits are computed wide, and weights stay wide; else logits in the model's dtype, and the weights go back to it.
  bool wide = false;
  bool correction = false;  // a constant is added to the scores for the choice alone (it balances the experts' load)
  // Experts in equal groups: only those of the chosen_groups groups with the largest sum of two best scores are chosen from.
  int64_t groups = 1;
  int64_t chosen_groups = 1;
  bool normalised = false;  // weights of a token are divided by their sum (+ sum_guard)
  double sum_guard = 0.0;
  double scale = 1.0;  // of the weights, last
};

// How the checkpoint calls the weights, after the block's prefix.
struct ExpertNames {
  std::string router = "gate.weight";                       // [E, D]
  std::string correction = "gate.e_score_correction_bias";  // [E]
  // One tensor a projection and expert: experts.3.gate_proj.weight [I, D], up_proj [I, D], down_proj [D, I].
  std::string each = "experts.";
  // Not empty: instead, one tensor for all experts, [E, 2I, D] with the gate's rows first ([E, I, D] not gated) and [E, D, I].
  std::string fused_input = {};
  std::string fused_output = {};
  std::string shared = "shared_experts.";          // prefix of the shared experts' MLP
  std::string shared_gate = {};                    // [1, D]; empty: none
  std::string latent_input = "fc1_latent_proj.";   // prefixes of the projections around the routed experts,
  std::string latent_output = "fc2_latent_proj.";  // where the shape has a latent width
};

struct ExpertsSpec {
  int64_t layer = 0;
  int64_t hidden = 0;  // D
  ExpertsShape shape;
  Routing routing;
  ExpertNames names = {};
  bool bias = false;  // of the shared experts and of the latent projections
};

class ExpertsBlock final : public Block {
 public:
  // `prefix` stands before every name of spec.names: "model.layers.0.mlp.".
  ExpertsBlock(Builder& builder, const std::string& prefix, const ExpertsSpec& spec);

  BlockShape shape() const override { return shape_; }
  at::Tensor output(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const override;

 private:
  struct Affine {
    const Parameter* weight = nullptr;  // null: no projection
    const Parameter* bias = nullptr;
    at::Tensor operator()(const at::Tensor& x, Execution& execution) const;
  };
  struct Route {
    at::Tensor chosen_Sk;
    at::Tensor weights_Sk;
  };
  Route route(const at::Tensor& x_SD, Execution& execution) const;
  // Scores by which experts are chosen, without gradients: corrected, and -inf outside the chosen groups.
  at::Tensor choice_scores(const at::Tensor& scores_SE, Execution& execution) const;
  at::Tensor shared_output(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const;

  ExpertsShape shape_;
  Routing routing_;
  int64_t router_;  // its number among the decoder's
  const Parameter* router_weight_ED_;
  const Parameter* correction_E_;  // null: none
  ExpertWeights experts_;
  Affine latent_input_, latent_output_;
  std::unique_ptr<MlpBlock> shared_;  // null: none
  const Parameter* shared_gate_1D_;   // null: none
};

}  // namespace longstraw::core::model
