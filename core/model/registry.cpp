#include "core/model/registry.h"

#include "core/base/errors.h"
#include "core/model/families/dense/dense.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace longstraw::core::model {

namespace {
const std::array<Family, 4>& families() {
  static const std::array<Family, 4> kFamilies{{
      {"llama", dense::read_llama, dense::parameter_shapes, dense::layer_states, dense::build},
      {"mistral", dense::read_mistral, dense::parameter_shapes, dense::layer_states, dense::build},
      {"qwen2", dense::read_qwen2, dense::parameter_shapes, dense::layer_states, dense::build},
      {"qwen3", dense::read_qwen3, dense::parameter_shapes, dense::layer_states, dense::build},
  }};
  return kFamilies;
}
}  // namespace

const Family& family_of(const std::string& model_type, const std::string& file) {
  const auto& all = families();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Family& f) { return f.model_type == model_type; });
  if (found != all.end()) return *found;
  std::vector<std::string> known;
  for (const Family& family : all) known.push_back(family.model_type);
  throw ConfigError(fmt::format("{}: model_type: \"{}\" is not supported; wanted one of {} (nearest: {})", file, model_type,
                                fmt::join(known, ", "), nearest(model_type, known)));
}

}  // namespace longstraw::core::model
