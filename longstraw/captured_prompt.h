#pragma once
// A prompt that is run once, for sampling and for training: its state, in the segments that the sweep will walk back over.
//
//   CapturedPrompt prompt(decoder, ids, {.longstraw = config, .lengths = {P + 1, P + longest response}});
//   auto responses = prompt.sample(stream, sampler_options);      // all members decode from the one state
//   longstraw_gradient(decoder, batch, {.captured = {&prompt}});  // replay and sweep over the same state
//
// It can be used any number of times: each use finds the same bits. It belongs to the weights that made it: using it after they
// changed throws ConfigError, unless the options allow staleness, which only the detached arm does (an exact sweep would recompute
// the prompt with the new weights).

#include "longstraw/config.h"
#include "longstraw/sampler.h"

#include "core/data/rollouts.h"
#include "core/model/decoder.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace longstraw {

struct PromptCapture;

struct CaptureOptions {
  LongstrawConfig longstraw;             // memory_budget is not read
  core::model::SequenceLengths lengths;  // of prompt and response: what rotary tables that depend on it are made for
  bool allow_stale = false;              // used after the weights changed all the same; the trainer counts and bounds it
  // Bytes that this prompt's step may come to with the graphs of its last segments kept since their capture: the first gradient of
  // them needs no second pass. They are held until then, also while responses are sampled; the caller divides what there is
  // among the prompts that it holds at once. 0: none. Of a prompt that is only sampled from, or scored, they are wasted.
  int64_t graph_budget = 0;
  std::function<void(int64_t tokens)> progress;
};

class CapturedPrompt {
 public:
  // Throws ConfigError for a prompt without tokens, and for allow_stale under an arm that sweeps the prompt.
  CapturedPrompt(const core::model::Decoder& decoder, std::vector<int64_t> prompt_ids, CaptureOptions options);
  ~CapturedPrompt();
  CapturedPrompt(const CapturedPrompt&) = delete;
  CapturedPrompt& operator=(const CapturedPrompt&) = delete;

  // As sample_group does. Prompt and longest response must be within lengths().
  std::vector<SampledResponse> sample(uint64_t stream, const SamplerOptions& options) const;

  const std::vector<int64_t>& prompt_ids() const { return prompt_ids_; }
  core::model::SequenceLengths lengths() const { return options_.lengths; }
  // Prompt tokens that were run forward for this state.
  int64_t captured_tokens() const;
  int64_t state_bytes() const;
  // Of the state and the graphs that are still kept, as far as they are counted (MemoryMeter).
  int64_t held_bytes() const;
  // The state's weights are those that the decoder has now.
  bool is_current() const;
  // Throws ConfigError unless it is current or may be stale.
  void check_usable() const;
  // Throws ConfigError, naming the key, where a sweep under `config` would walk other segments; FormatError where `group` is not of
  // this prompt or has a response outside lengths().
  void check_fits(const core::data::PromptGroup& group, const LongstrawConfig& config) const;

  // For the sweep.
  PromptCapture& capture() { return *capture_; }

 private:
  const core::model::Decoder& decoder_;
  std::vector<int64_t> prompt_ids_;
  CaptureOptions options_;
  std::unique_ptr<PromptCapture> capture_;
};

// Bytes that the state of a captured prompt of so many tokens will hold, the segment at hand included: what decides how many fit.
int64_t captured_bytes(const core::model::Decoder& decoder, int64_t prompt_tokens, const LongstrawConfig& config);

}  // namespace longstraw
