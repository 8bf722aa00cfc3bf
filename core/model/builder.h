#pragma once
// Declares what a decoder consists of, in the order of its layers, while its blocks are put together: parameters under
// their checkpoint names, states, routers. No memory is taken: weights are read later, into the declared parameters.

#include "core/model/execution.h"
#include "core/model/state.h"

#include <memory>
#include <string>
#include <vector>

namespace longstraw::core::model {

// A router's choices are stored with the prompt: what is needed to make room for them.
struct Router {
  int64_t layer = 0;
  int64_t experts = 0;
  int64_t chosen = 0;
};

class Builder {
 public:
  const Parameter* parameter(std::string name, Shape shape) { return add({std::move(name), std::move(shape)}); }
  const Parameter* parameter_if(bool present, std::string name, Shape shape) {
    return present ? parameter(std::move(name), std::move(shape)) : nullptr;
  }
  // A constant of the checkpoint that is never trained, kept wide.
  const Parameter* constant(std::string name, Shape shape) { return add({std::move(name), std::move(shape), false}); }
  int64_t state(MixerState state);  // its slot
  int64_t router(Router router);    // its number

  std::vector<std::shared_ptr<Parameter>> parameters;
  std::vector<MixerState> states;
  std::vector<Router> routers;

 private:
  const Parameter* add(Parameter parameter);
};

}  // namespace longstraw::core::model
