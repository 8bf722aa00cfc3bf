#pragma once
// Faults planted into LongStraw's own computation, each where a real one would sit: in the execution of an operation, in
// the arithmetic of a block, in what a recompute reuses, or in the adjoint of the state. Product code has no switch for
// them: they come in through SweepOptions.

#include "longstraw/sweep.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace longstraw::test {

using Around = std::function<std::unique_ptr<core::model::Execution>(core::model::Execution&, const ForwardPass&)>;

struct Fault {
  std::string what;
  std::string name;  // the comparator's
  std::string also;  // what it may say instead, where it can only tell the likely from the possible
  Around operation;  // changes how an operation is carried out: a trace sees what comes of it
  Around block;      // changes what a block hands to its operations: a trace sees what it hands
  std::function<void(const Node&, const PromptState&)> before_backward;
};

// All that `decoder` has the mechanism for. Each is used for one sweep.
std::vector<Fault> faults_of(const core::model::Decoder& decoder);

// What must not be found: no fault, and for latent attention the expanded form in which some of the faults are written, without
// one.
std::vector<Fault> no_faults_of(const core::model::Decoder& decoder);

}  // namespace longstraw::test
