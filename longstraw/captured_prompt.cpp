#include "longstraw/captured_prompt.h"

#include "longstraw/decode_group.h"
#include "longstraw/memory_plan.h"
#include "longstraw/prompt_capture.h"

#include "core/base/errors.h"
#include "core/device/memory_meter.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace longstraw {
namespace {

using core::config::name_of;
using core::data::Batch;
using core::model::Decoder;

Batch without_responses(const std::vector<int64_t>& prompt_ids) {
  return {core::data::PromptGroup{.prompt_id = "", .prompt_ids = prompt_ids, .responses = {}}};
}

// First positions of the prompt's segments whose graphs fit into the budget, with responses as long as they may get.
std::set<int64_t> segments_to_keep(const Decoder& decoder, const std::vector<int64_t>& prompt_ids, const CaptureOptions& options) {
  if (options.graph_budget <= 0) return {};
  LongstrawConfig config = options.longstraw;
  config.memory_budget = {options.graph_budget};
  Batch batch = without_responses(prompt_ids);
  const auto longest = options.lengths.longest - static_cast<int64_t>(prompt_ids.size());
  const core::data::Response response{.completion_ids = std::vector<int64_t>(std::max<int64_t>(1, longest), 0)};
  batch[0].responses.assign(config.replay_batch, response);
  const TokenTree tree = build_token_tree(batch, config);
  std::set<int64_t> begins;
  for (const Node* node : plan_memory(decoder, tree, config).keep) {
    if (node->loss.empty()) begins.insert(node->begin);
  }
  return begins;
}

}  // namespace

CapturedPrompt::CapturedPrompt(const Decoder& decoder, std::vector<int64_t> prompt_ids, CaptureOptions options)
    : decoder_(decoder), prompt_ids_(std::move(prompt_ids)), options_(std::move(options)) {
  if (prompt_ids_.empty()) throw ConfigError("captured prompt: no token, wanted at least one");
  if (options_.allow_stale && options_.longstraw.prompt_gradient != PromptGradient::kDetached) {
    throw ConfigError(
        fmt::format("captured prompt: {} recomputes the prompt, so its state can't be of other weights; only detached's may",
                    name_of(options_.longstraw.prompt_gradient)));
  }
  const core::device::MemoryMeter meter(decoder.device());
  const int64_t live_before = meter.live_bytes();
  const std::set<int64_t> keep = segments_to_keep(decoder, prompt_ids_, options_);
  const TokenTree tree = build_token_tree(without_responses(prompt_ids_), options_.longstraw);
  capture_.reset(new PromptCapture{.state = PromptState(decoder, tree.state_tokens, tree.adjoint_begin),
                                   .gradients = {},
                                   .kept = {},
                                   .tokens = 0,
                                   .graph_bytes = 0});
  NodeRun run{.gradients = &capture_->gradients, .lengths = options_.lengths};
  for (const Node* node = tree.root.get(); !node->children.empty();) {
    node = node->children.front().get();
    const bool keeps_graph = keep.contains(node->begin);
    const at::AutoGradMode grad_mode(keeps_graph);
    SegmentGraph graph = run_node(decoder, *node, capture_->state, run);
    if (keeps_graph) capture_->kept.emplace(node->begin, std::move(graph));
    if (!node->carries_gradient) capture_->state.forget_before(node->end());
    capture_->tokens = node->end();
    if (options_.progress) options_.progress(capture_->tokens);
  }
  if (!keep.empty()) capture_->graph_bytes = std::max<int64_t>(0, meter.live_bytes() - live_before - state_bytes());
}

CapturedPrompt::~CapturedPrompt() = default;

std::vector<SampledResponse> CapturedPrompt::sample(uint64_t stream, const SamplerOptions& options) const {
  check_usable();
  const auto prompt = static_cast<int64_t>(prompt_ids_.size());
  const int64_t longest = prompt + options.rollout.max_completion_length;
  if (longest > options_.lengths.longest) {
    throw ConfigError(fmt::format("captured prompt: rollout.max_completion_length {} after {} prompt tokens, made for {} in all",
                                  options.rollout.max_completion_length, prompt, options_.lengths.longest));
  }
  return decode_group({.decoder = decoder_,
                       .state = capture_->state,
                       .last_id = prompt_ids_.back(),
                       .past_tokens = prompt - 1,
                       .lengths = options_.lengths},
                      stream, options);
}

int64_t CapturedPrompt::captured_tokens() const { return capture_->tokens; }
int64_t CapturedPrompt::state_bytes() const { return capture_->state.state_bytes(); }
int64_t CapturedPrompt::held_bytes() const { return state_bytes() + (capture_->kept.empty() ? 0 : capture_->graph_bytes); }
bool CapturedPrompt::is_current() const { return capture_->state.is_current(decoder_); }

void CapturedPrompt::check_usable() const {
  if (!options_.allow_stale) capture_->state.check_weights(decoder_);
}

void CapturedPrompt::check_fits(const core::data::PromptGroup& group, const LongstrawConfig& config) const {
  const auto differ = [](const char* key, const auto& made, const auto& wanted) {
    throw ConfigError(
        fmt::format("captured prompt: made under longstraw.{} {}, used under {}: capture it anew", key, made, wanted));
  };
  const LongstrawConfig& own = options_.longstraw;
  if (own.prompt_gradient != config.prompt_gradient) {
    differ("prompt_gradient", name_of(own.prompt_gradient), name_of(config.prompt_gradient));
  }
  if (own.segment_tokens != config.segment_tokens) differ("segment_tokens", own.segment_tokens, config.segment_tokens);
  if (own.prompt_gradient == PromptGradient::kTail && own.tail_tokens != config.tail_tokens) {
    differ("tail_tokens", own.tail_tokens, config.tail_tokens);
  }
  if (group.prompt_ids != prompt_ids_) {
    throw FormatError(fmt::format("captured prompt: prompt {} has other tokens than the one that was captured", group.prompt_id));
  }
  for (size_t m = 0; m < group.responses.size(); ++m) {
    const auto length = static_cast<int64_t>(prompt_ids_.size() + group.responses[m].completion_ids.size());
    if (length >= options_.lengths.shortest && length <= options_.lengths.longest) continue;
    throw FormatError(fmt::format("captured prompt: prompt {}: response {} makes {} tokens, captured for {} to {}", group.prompt_id,
                                  m, length, options_.lengths.shortest, options_.lengths.longest));
  }
}

int64_t captured_bytes(const Decoder& decoder, int64_t prompt_tokens, const LongstrawConfig& config) {
  LongstrawConfig plain = config;
  plain.memory_budget = {0};
  const TokenTree tree = build_token_tree(without_responses(std::vector<int64_t>(prompt_tokens, 0)), plain);
  return plan_memory(decoder, tree, plain).state;
}

}  // namespace longstraw
