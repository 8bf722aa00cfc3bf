#pragma once
// LongStraw's way to carry a decoder's operations out: tokens of one segment (or of several responses replayed
// together) over a prompt state. Weight gradients are added in place to a GradientStore, and each operation keeps no
// more for its backward pass than its formula needs.

#include "longstraw/gradient_store.h"
#include "longstraw/prefix_attention.h"
#include "longstraw/prompt_state.h"

#include "core/model/execution.h"

#include <vector>

namespace longstraw {

class SegmentExecution final : public core::model::Execution {
 public:
  enum class StateUse {
    kWrite,   // capture: the tokens' keys and values go into the state
    kVerify,  // recompute: they are there already, and are compared bit for bit
    kLeave,   // replay of responses: nobody comes after these tokens
  };
  struct Options {
    std::vector<Span> spans;
    Past past;
    StateUse state_use = StateUse::kLeave;
    PromptState* state = nullptr;        // of kWrite and kVerify
    GradientStore* gradients = nullptr;  // may be null when no backward pass follows
  };
  explicit SegmentExecution(Options options) : options_(std::move(options)) {}

  at::Tensor embedding(const at::Tensor& ids_S, const core::model::Parameter& weight_VD) override;
  at::Tensor linear(const at::Tensor& x, const core::model::Parameter& weight_OI, const core::model::Parameter* bias_O) override;
  at::Tensor rms_norm(const at::Tensor& x, const core::model::Parameter& weight, double eps) override;
  at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) override;
  at::Tensor rotate(const at::Tensor& x_Shd, const core::model::RotaryTable& table) override;
  at::Tensor attention(const core::model::AttentionSpec& spec, const at::Tensor& query_SHd, const at::Tensor& key_SGd,
                       const at::Tensor& value_SGd) override;
  void keep_keys_values(const core::model::AttentionSpec& spec, const at::Tensor& key_SGd, const at::Tensor& value_SGd) override;

  // The tokens' own keys and values, [S, G, d], by layer, still in their graph: where the state's adjoint enters.
  struct OwnState {
    int64_t layer = 0;
    at::Tensor key_SGd, value_SGd;
  };
  const std::vector<OwnState>& own_state() const { return own_state_; }
  // Layers whose recomputed keys and values were not the captured bits.
  int64_t mismatches() const { return mismatches_; }

 private:
  Options options_;
  std::vector<OwnState> own_state_;
  int64_t mismatches_ = 0;
};

}  // namespace longstraw
