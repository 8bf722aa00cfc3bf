#pragma once
// Section `longstraw`: how the capture-and-replay trainer runs a prompt and its responses.

#include "core/config/fields.h"

#include <cstdint>

namespace longstraw {

enum class PromptGradient { kDetached, kTail, kExact };
constexpr auto names_of(PromptGradient) {
  using core::config::EnumName;
  return std::array{EnumName{PromptGradient::kDetached, "detached"}, EnumName{PromptGradient::kTail, "tail"},
                    EnumName{PromptGradient::kExact, "exact"}};
}

enum class SelfCheck { kOff, kFirstStep };
constexpr auto names_of(SelfCheck) {
  using core::config::EnumName;
  return std::array{EnumName{SelfCheck::kOff, "off"}, EnumName{SelfCheck::kFirstStep, "first_step"}};
}

struct LongstrawConfig {
  PromptGradient prompt_gradient = PromptGradient::kExact;
  std::int64_t tail_tokens = 0;
  std::int64_t segment_tokens = 2048;
  std::int64_t replay_batch = 1;
  core::config::Bytes memory_budget = core::config::gibibytes(8);
  SelfCheck self_check = SelfCheck::kOff;

  static constexpr auto fields() {
    using namespace core::config;
    using C = LongstrawConfig;
    return std::tuple{
        field("prompt_gradient", &C::prompt_gradient,
              "how much of the prompt's gradient is kept: none, the last tail_tokens', all"),
        field("tail_tokens", &C::tail_tokens, "last prompt tokens that keep their gradient under tail", at_least(0)),
        field("segment_tokens", &C::segment_tokens, "tokens run as one graph", at_least(1)),
        field("replay_batch", &C::replay_batch, "responses run together in one replay", at_least(1)),
        field("memory_budget", &C::memory_budget, "bytes above the weights that may hold kept segment graphs", at_least(0)),
        field("self_check", &C::self_check, "check the first step against the plain way"),
    };
  }
  bool operator==(const LongstrawConfig&) const = default;
};

}  // namespace longstraw
