#include "app/arms.h"

#include "core/base/errors.h"
#include "core/device/device.h"
#include "longstraw/trainer.h"
#include "reference/gradient.h"
#include "reference/objective.h"

#include <fmt/format.h>

#include <algorithm>

namespace longstraw::app {
namespace {

using core::config::name_of;
using core::data::Batch;
using core::model::Decoder;
using core::model::StepGradient;

std::string mebibytes(int64_t bytes) { return fmt::format("{:.0f} MiB", double(bytes) / (1 << 20)); }

StepGradient run_reference(const Decoder& decoder, const Batch& batch, const RunConfig& config, std::optional<int64_t> cut) {
  return reference::reference_gradient(
      decoder, batch,
      {.run = {.attention = config.reference.attention, .tail_tokens = cut, .trace = config.record.trace},
       .objective = config.objective,
       .temperature = config.rollout.temperature,
       .max_completion_length = config.rollout.max_completion_length});
}

StepGradient run_longstraw(PromptGradient kept, const Decoder& decoder, const Batch& batch, const RunConfig& config,
                           Progress& progress) {
  TrainerOptions options{
      .longstraw = config.longstraw,
      .objective = config.objective,
      .temperature = config.rollout.temperature,
      .max_completion_length = config.rollout.max_completion_length,
      .progress = [&progress](const char* phase, int64_t tokens) { progress.at(fmt::format("{} of {} tokens", phase, tokens)); },
      .trace = config.record.trace};
  options.longstraw.prompt_gradient = kept;
  if (kept == PromptGradient::kTail) options.longstraw.tail_tokens = tail_tokens(config, batch);
  return longstraw_gradient(decoder, batch, options);
}

StepGradient run(Arm arm, const Decoder& decoder, const Batch& batch, const RunConfig& config, Progress& progress,
                 std::optional<int64_t> cut) {
  switch (arm) {
    case Arm::kReference: return run_reference(decoder, batch, config, cut);
    case Arm::kDetached: return run_longstraw(PromptGradient::kDetached, decoder, batch, config, progress);
    case Arm::kTail: return run_longstraw(PromptGradient::kTail, decoder, batch, config, progress);
    case Arm::kExact: break;
  }
  return run_longstraw(PromptGradient::kExact, decoder, batch, config, progress);
}

// A budget decides what is kept beyond what a step can't do without; it can't make that smaller.
void say_if_over_budget(const StepGradient& result, const LongstrawConfig& config, Progress& progress) {
  const auto planned = result.bytes.find("planned_peak_bytes");
  if (planned == result.bytes.end() || planned->second <= config.memory_budget) return;
  progress.say(
      fmt::format("  the least that this step needs, {}, is above longstraw.memory_budget, {}; smaller "
                  "longstraw.segment_tokens or longstraw.replay_batch need less",
                  mebibytes(planned->second), mebibytes(config.memory_budget)));
}

// What should be zero and is not.
void say_facts(const StepGradient& result, Progress& progress) {
  const auto fact = [&](const char* name) {
    const auto found = result.facts.find(name);
    return found == result.facts.end() ? 0.0 : found->second;
  };
  if (const double count = fact("recompute_mismatches"); count != 0) {
    progress.say(fmt::format("  {} recomputed segments differ from what was captured (recompute_mismatches)", count));
  }
  if (const double count = fact("changed_choices"); count != 0) {
    progress.say(fmt::format("  {} routers or indexers chose otherwise at recompute than at capture (changed_choices)", count));
  }
  if (const double distance = fact("self_check_relative_l2"); distance != 0) {
    progress.say(fmt::format(
        "  self check: relative L2 {:.2e} from the plain way (every segment recomputed, one response at a time)", distance));
  }
}

}  // namespace

std::unique_ptr<Decoder> open_model(const core::model::ModelConfig& config, const core::model::LoraConfig& lora,
                                    Progress& progress) {
  if (config.path.empty()) throw ConfigError("model.path: not given, wanted a checkpoint folder");
  core::device::set_up_determinism(int(config.threads));
  const auto device = core::device::parse_device(config.device);
  progress.begin(fmt::format("reading {} as {}", config.path, name_of(config.dtype)));
  auto decoder = core::model::load_decoder(config.path, core::device::parse_dtype(std::string(name_of(config.dtype))), device);
  if (lora.wanted()) core::model::add_lora(*decoder, lora);
  progress.done();
  for (const std::string& note : decoder->notes()) progress.say("  model: " + note);
  return decoder;
}

int64_t tail_tokens(const RunConfig& config, const Batch& batch) {
  constexpr int64_t kDefaultTail = 64;
  if (config.longstraw.tail_tokens > 0) return config.longstraw.tail_tokens;
  size_t longest = 1;
  for (const auto& group : batch) longest = std::max(longest, group.prompt_ids.size());
  return std::min(kDefaultTail, int64_t(longest) - 1);
}

StepGradient run_arm(Arm arm, const Decoder& decoder, const Batch& batch, const RunConfig& config, Progress& progress,
                     std::optional<int64_t> reference_cut) {
  progress.begin(fmt::format("{} ({})", name_of(arm), core::device::dtype_name(decoder.dtype())));
  StepGradient result = run(arm, decoder, batch, config, progress, reference_cut);
  progress.done(fmt::format("peak {} above the weights, loss {:.6g}", mebibytes(result.bytes.at("peak_bytes")), result.loss));
  say_if_over_budget(result, config.longstraw, progress);
  say_facts(result, progress);
  return result;
}

bool has_no_gradient(const Batch& batch, const core::objective::ObjectiveConfig& objective) {
  if (objective.beta > 0) return false;
  for (const auto& group : reference::advantages(batch, objective)) {
    if (std::any_of(group.begin(), group.end(), [](double a) { return a != 0.0; })) return false;
  }
  return true;
}

}  // namespace longstraw::app
