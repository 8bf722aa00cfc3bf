#pragma once
// config.json of a family as a test's JSON: reads it, expects refusals, sums up what it describes.

#include "core/base/errors.h"
#include "core/model/registry.h"
#include "tests/support/fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace longstraw::core::model {

inline DecoderParts read_config(const nlohmann::json& config) {
  const test::TemporaryFolder folder;
  test::write_json(folder.path() / "config.json", config);
  return read_parts(folder.path());
}

// A FormatError whose message has all of `words`: file, key, what it got or what it wanted.
inline void expect_refused(const nlohmann::json& config, const std::vector<std::string>& words) {
  try {
    read_config(config);
    FAIL() << "was accepted: " << config.dump();
  } catch (const FormatError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("config.json"));
    for (const auto& word : words) EXPECT_THAT(error.what(), testing::HasSubstr(word));
  }
}

inline nlohmann::json merged(nlohmann::json config, const nlohmann::json& changes) {
  config.update(changes);
  return config;
}

inline nlohmann::json without(nlohmann::json config, const std::string& key) {
  config.erase(key);
  return config;
}

struct Sums {
  int64_t parameters = 0;  // numbers
  int64_t tensors = 0;
  int64_t state_bytes_per_token = 0;  // in bfloat16
  int64_t state_bytes_fixed = 0;      // the model's dtype bfloat16, wide values float32
};

inline Sums sums_of(const DecoderParts& parts) {
  Sums sums;
  for (const auto& parameter : parts.builder.parameters) {
    sums.parameters += element_count(parameter->shape);
    sums.tensors += 1;
  }
  for (const MixerState& state : parts.builder.states) {
    for (const TokenRows& rows : state.rows) sums.state_bytes_per_token += 2 * rows.heads * rows.width;
    for (const Carried& carried : state.carried) sums.state_bytes_fixed += (carried.wide ? 4 : 2) * element_count(carried.shape);
  }
  return sums;
}

inline const Parameter* find_parameter(const DecoderParts& parts, const std::string& name) {
  for (const auto& parameter : parts.builder.parameters) {
    if (parameter->name == name) return parameter.get();
  }
  return nullptr;
}

}  // namespace longstraw::core::model
