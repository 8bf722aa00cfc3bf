#include "core/model/builder.h"

namespace longstraw::core::model {

const Parameter* Builder::add(Parameter parameter) {
  parameters.push_back(std::make_shared<Parameter>(std::move(parameter)));
  return parameters.back().get();
}

int64_t Builder::state(MixerState state) {
  states.push_back(std::move(state));
  return static_cast<int64_t>(states.size()) - 1;
}

int64_t Builder::router(Router router) {
  routers.push_back(router);
  return static_cast<int64_t>(routers.size()) - 1;
}

}  // namespace longstraw::core::model
