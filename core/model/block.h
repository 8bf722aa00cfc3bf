#pragma once
// The building blocks of a decoder: a norm, a block, a residual connection, and again. A block mixes tokens (blocks/
// attention, latent_attention, delta_rule, state_space) or works on each by itself (mlp, experts).

#include "core/model/builder.h"
#include "core/model/execution.h"
#include "core/model/shapes.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace longstraw::core::model {

// What all layers of one run share about where its tokens stand.
struct TokenPositions {
  at::Tensor positions_S;  // int64, absolute position of each token in its sequence
  RotaryTable rotary;      // undefined for a model without positions
};

class Block {
 public:
  virtual ~Block() = default;
  virtual BlockShape shape() const = 0;
  // x [S, D] after the norm -> [S, D], before the residual connection.
  virtual at::Tensor output(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const = 0;
  // Only what later tokens need; nothing for a block without a state.
  virtual void state(const at::Tensor& x_SD, const TokenPositions& where, Execution& execution) const;
  virtual bool has_state() const { return false; }
};

// x · multiplier; x itself where the multiplier is 1, so that models without one round as ever.
at::Tensor scaled(const at::Tensor& x, double multiplier);

struct Norm {
  const Parameter* weight = nullptr;
  double eps = 1e-6;
  bool zero_centred = false;
  at::Tensor operator()(const at::Tensor& x, Execution& execution) const;
};

// x += multiplier · Σ blocks(norm(x)): one block, or several side by side that read the same input.
struct Residual {
  Norm norm;
  std::vector<std::unique_ptr<Block>> blocks;
  double multiplier = 1.0;
  bool wide = false;  // the sum is kept wide whatever the model's dtype; the norm reads it in the model's
};

struct Layer {
  std::vector<Residual> residuals;
};

}  // namespace longstraw::core::model
