#pragma once
// A prompt that is run once, for sampling and for training: its state, in the segments that the sweep will walk back over.
//
//   CapturedPrompt prompt(decoder, ids, {.longstraw = config, .lengths = {P + 1, P + longest response}});
//   auto responses = prompt.sample(stream, sampler_options);      // all members decode from the one state
//   longstraw_gradient(decoder, batch, {.captured = {&prompt}});  // replay and sweep over the same state
//
// It belongs to the weights that made it: using it after they changed throws ConfigError, unless the options allow staleness, which
// only the detached arm does (an exact sweep would recompute the prompt with the new weights).

#include "longstraw/config.h"
#include "longstraw/sampler.h"

#include "core/model/decoder.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace longstraw {

class PromptState;

struct CaptureOptions {
  LongstrawConfig longstraw;
  core::model::SequenceLengths lengths;  // of prompt and response: what rotary tables that depend on it are made for
  bool allow_stale = false;              // used after the weights changed all the same; the trainer counts and bounds it
  std::function<void(int64_t tokens)> progress;
};

class CapturedPrompt {
 public:
  CapturedPrompt(const core::model::Decoder& decoder, std::vector<int64_t> prompt_ids, CaptureOptions options);
  ~CapturedPrompt();
  CapturedPrompt(const CapturedPrompt&) = delete;
  CapturedPrompt& operator=(const CapturedPrompt&) = delete;

  std::vector<SampledResponse> sample(uint64_t stream, const SamplerOptions& options) const;

  const std::vector<int64_t>& prompt_ids() const { return prompt_ids_; }
  core::model::SequenceLengths lengths() const { return options_.lengths; }
  // Prompt tokens that were run forward for this state.
  int64_t captured_tokens() const;
  int64_t state_bytes() const;
  // The state's weights are those that the decoder has now.
  bool is_current() const;

 private:
  const core::model::Decoder& decoder_;
  std::vector<int64_t> prompt_ids_;
  CaptureOptions options_;
  std::unique_ptr<PromptState> state_;
};

// Bytes that a captured prompt of so many tokens will hold: what decides how many fit.
int64_t captured_bytes(const core::model::Decoder& decoder, int64_t prompt_tokens, const LongstrawConfig& config);

}  // namespace longstraw
