#include "core/model/registry.h"

#include "core/base/errors.h"
#include "core/model/families/deepseek/deepseek.h"
#include "core/model/families/dense/dense.h"
#include "core/model/families/glm/glm4_moe.h"
#include "core/model/families/mamba/mamba.h"
#include "core/model/families/qwen3_next/qwen3_next.h"

#include <fmt/format.h>

#include <algorithm>

namespace longstraw::core::model {

namespace {
const std::vector<Family>& families() {
  static const std::vector<Family> kFamilies{
      {"llama", dense::llama},
      {"mistral", dense::mistral},
      {"qwen2", dense::qwen2},
      {"qwen3", dense::qwen3},
      {"smollm3", dense::smollm3},
      {"glm4_moe", glm::glm4_moe, glm::glm4_moe_layout},
      {"qwen3_next", qwen3_next::qwen3_next, qwen3_next::layout},
      {"qwen3_5", qwen3_next::qwen3_5, qwen3_next::layout},
      {"qwen3_5_text", qwen3_next::qwen3_5_text, qwen3_next::layout},
      {"qwen3_5_moe", qwen3_next::qwen3_5_moe, qwen3_next::layout},
      {"qwen3_5_moe_text", qwen3_next::qwen3_5_moe_text, qwen3_next::layout},
      {"deepseek_v3", deepseek::deepseek_v3, deepseek::layout},
      {"deepseek_v32", deepseek::deepseek_v32, deepseek::layout},
      {"glm_moe_dsa", deepseek::glm_moe_dsa, deepseek::layout},
      {"mamba2", mamba::mamba2, mamba::mamba2_layout},
      {"nemotron_h", mamba::nemotron_h, mamba::nemotron_h_layout},
      {"bamba", mamba::bamba},
      {"granitemoehybrid", mamba::granitemoehybrid},
      {"falcon_h1", mamba::falcon_h1},
  };
  return kFamilies;
}
}  // namespace

std::vector<std::string> model_types() {
  std::vector<std::string> known;
  for (const Family& family : families()) known.push_back(family.model_type);
  return known;
}

const Family& family_of(const std::string& model_type, const std::string& file) {
  const auto& all = families();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Family& f) { return f.model_type == model_type; });
  if (found != all.end()) return *found;
  const auto known = model_types();
  throw ConfigError(fmt::format("{}: model_type: \"{}\" is not supported; wanted one of {} (nearest: {})", file, model_type,
                                fmt::join(known, ", "), nearest(model_type, known)));
}

DecoderParts read_parts(const std::filesystem::path& folder) {
  const JsonReader config = read_json((folder / "config.json").string());
  DecoderParts parts = family_of(config.text("model_type"), config.file()).build(config);
  parts.architecture.model_type = config.text("model_type");
  parts.architecture.scale_blocks = read_scale_blocks(config);
  // A multimodal config.json may name them in its text part alone, where the family has read them.
  if (config.has("eos_token_id")) parts.architecture.eos_ids = config.ids("eos_token_id");
  // What Hugging Face's generate() stops at; chat models often name more ids here than in config.json.
  if (const auto generation = folder / "generation_config.json"; std::filesystem::exists(generation)) {
    if (auto ids = read_json(generation.string()).ids("eos_token_id"); !ids.empty()) parts.architecture.eos_ids = std::move(ids);
  }
  return parts;
}

Architecture read_architecture(const std::filesystem::path& folder) { return read_parts(folder).architecture; }

}  // namespace longstraw::core::model
