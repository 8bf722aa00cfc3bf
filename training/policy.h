#pragma once
// The four arms behind one interface. Only what is here differs between them: how advantages, log-probs and the gradient are
// computed, and what a prompt that was run once is good for. Rollouts, rewards, mini-batches and optimizer steps are the same code.

#include "core/data/rollouts.h"
#include "core/model/decoder.h"
#include "core/model/step_gradient.h"
#include "longstraw/captured_prompt.h"
#include "training/settings.h"

#include <memory>
#include <vector>

namespace longstraw::training {

// Parallel to a batch: prompts that were run already; empty, or null where it has to be run.
using Captured = std::vector<CapturedPrompt*>;

class Policy {
 public:
  virtual ~Policy() = default;
  // [prompt][member], from rewards; both arms' own code.
  virtual std::vector<std::vector<double>> advantages(const core::data::Batch& batch) const = 0;
  // Also gives entropies, of the mean that metrics show.
  virtual core::model::StepGradient gradient(const core::model::Decoder& decoder, const core::data::Batch& batch,
                                             const Captured& captured) const = 0;
  // Log-probs under `decoder`, which may be another than the one that is trained.
  virtual core::model::TokenScores scores(const core::model::Decoder& decoder, const core::data::Batch& batch,
                                          const Captured& captured) const = 0;
  // How a prompt is to be run so that its state serves this arm's gradient too; `serves_gradient` is false for the reference, which
  // runs every response whole.
  virtual LongstrawConfig capture() const = 0;
  virtual bool serves_gradient() const = 0;
  // Whether a step of this batch runs a scoring pass before its gradient.
  virtual bool scores_first(const core::data::Batch& batch) const = 0;
};

// `objective`: as the loop completes it (a penalty is one more reward).
std::unique_ptr<Policy> make_policy(const Settings& settings, const core::objective::ObjectiveConfig& objective);

}  // namespace longstraw::training
