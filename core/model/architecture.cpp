#include "core/model/architecture.h"

#include "core/model/json_reader.h"
#include "core/model/registry.h"

namespace longstraw::core::model {

Architecture read_architecture(const std::filesystem::path& folder) {
  const JsonReader config = read_json((folder / "config.json").string());
  const Family& family = family_of(config.text("model_type"), config.file());
  Architecture architecture = family.read(config);
  architecture.eos_ids = config.ids("eos_token_id");
  // What Hugging Face's generate() stops at; chat models often name more ids here than in config.json.
  if (const auto generation = folder / "generation_config.json"; std::filesystem::exists(generation)) {
    if (auto ids = read_json(generation.string()).ids("eos_token_id"); !ids.empty()) architecture.eos_ids = std::move(ids);
  }
  return architecture;
}

}  // namespace longstraw::core::model
