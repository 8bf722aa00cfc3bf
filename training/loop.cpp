#include "training/loop.h"

#include "core/base/errors.h"
#include "training/evaluation.h"
#include "training/local_sampler.h"
#include "training/optimizer_step.h"
#include "training/server_sampler.h"
#include "training/server_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

namespace longstraw::training {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

int64_t total_steps(const TrainConfig& train, int64_t rows) {
  if (train.max_steps > 0) return train.max_steps;
  const auto generations = int64_t(std::ceil(train.num_train_epochs * double(rows) / double(train.prompts_per_step)));
  return std::max<int64_t>(1, generations) * steps_of_generation(train);
}

core::data::RolloutConfig seeded(core::data::RolloutConfig rollout, uint64_t seed) {
  rollout.seed = mixed(seed, rollout.seed);
  return rollout;
}

int64_t tokens_of(const core::data::Batch& batch) {
  int64_t tokens = 0;
  for (const auto& group : batch) {
    for (const auto& response : group.responses) tokens += int64_t(group.prompt_ids.size() + response.completion_ids.size());
  }
  return tokens;
}

int64_t failed_reward_calls(const Data& data) {
  if (!data.rewards) return 0;
  const auto failed = data.rewards->failed_calls();
  return std::accumulate(failed.begin(), failed.end(), int64_t{0});
}

}  // namespace

Loop::Loop(core::model::Decoder& decoder, Data& data, const Settings& settings, const Hooks& hooks)
    : decoder_(decoder),
      data_(data),
      settings_(settings),
      hooks_(hooks),
      policy_(make_policy(settings, data.objective)),
      store_(settings.train.output_dir, settings.train.save_total_limit, settings.train.save_best) {
  const auto stops = stop_token_ids(settings.rollout, decoder);
  // A generation's prompts are held at once, and share the budget.
  const int64_t share = int64_t(settings.longstraw.memory_budget) / settings.train.prompts_per_step;
  LocalSamplerOptions local{.capture = policy_->capture(), .stop_token_ids = stops, .progress = {}};
  eval_sampler_ = std::make_unique<LocalSampler>(decoder, local);
  local.allow_stale = settings.train.stale_steps > 0;
  local.graph_budget = policy_->serves_gradient() ? share : 0;
  if (settings.rollout.server.url.empty()) {
    sampler_ = std::make_unique<LocalSampler>(decoder, local);
  } else {
    sampler_ = std::make_unique<ServerSampler>(ServerSamplerOptions{
        .server = settings.rollout.server,
        .stop_token_ids = stops,
        .vocab = decoder.architecture().vocab,
        .write_weights = ServerWeights(decoder, settings.model.path, fs::path(settings.train.output_dir) / "server_weights")});
  }
  sampling_ = {.sampler = sampler_.get(),
               .tokenizer = data.tokenizer.get(),
               .rewards = data.rewards.get(),
               .reward_weights = data.reward_weights,
               .progress = hooks.progress};
  if (data.prompts) {
    source_ = std::make_unique<PromptSource>(std::move(*data.prompts), seeded(settings.rollout, settings.train.seed),
                                             settings.train.seed, settings.train.shuffle, sampling_);
  } else {
    source_ = std::make_unique<FileSource>(std::move(*data.rollouts), stops, settings.rollout.max_completion_length);
  }
  total_steps_ = total_steps(settings.train, source_->rows());
  if (data.objective.beta > 0.0) reference_model_ = std::make_unique<ReferenceModel>(settings, decoder);
  optimizer_ = std::make_unique<core::optim::Optimizer>(decoder, settings.optim, total_steps_);
}

Outcome Loop::run() {
  resume();
  try {
    steps();
  } catch (const std::exception& error) {
    keep_what_is_whole(error.what());
    throw;
  }
  if (finished_) journal_->close();
  return {.interrupted = !finished_, .steps = state_.step, .checkpoint = checkpoint_};
}

void Loop::keep_what_is_whole(const std::string& problem) {
  if (generation_ && generation_->steps_done == 0) {
    state_ = before_generation_;
    generation_.reset();
  }
  if (writing_ || state_.step == std::max<int64_t>(saved_step_, 0)) return;
  try {
    save();
    hooks_.say(fmt::format("{}: {} steps are saved in {}", problem, state_.step, checkpoint_.string()));
  } catch (const std::exception& error) {
    hooks_.say(fmt::format("{} steps could not be saved: {}", state_.step, error.what()));
  }
}

std::optional<fs::path> Loop::starting_checkpoint() const {
  const std::string& from = settings_.train.resume_from_checkpoint;
  const auto newest = store_.newest();
  if (from == "auto") return newest;
  if (from != "never") {
    if (newest && fs::exists(*newest) && fs::path(from).parent_path() == newest->parent_path() && fs::path(from) != *newest) {
      throw ConfigError(
          fmt::format("train.resume_from_checkpoint: {}, but {} is newer and would be taken for this run's; move it away", from,
                      newest->string()));
    }
    return fs::path(from);
  }
  if (newest) {
    throw ConfigError(fmt::format(
        "train.resume_from_checkpoint: never, but {} is there: name another train.output_dir, or move it away", newest->string()));
  }
  return std::nullopt;
}

void Loop::resume() {
  const auto from = starting_checkpoint();
  if (from) {
    state_ = read_trainer_state(*from);
    restore(*from, decoder_, *optimizer_, reference_model_ ? reference_model_->changing() : nullptr);
    if (const auto& kept = state_.extra.value("generation", nlohmann::json()); !kept.is_null()) {
      generation_ = generation_from_json(kept);
    }
    evaluated_step_ = state_.extra.value("evaluated_step", int64_t{-1});
    saved_step_ = state_.step;
    checkpoint_ = *from;
    // Whatever weights a server has by now. It is told at whole sync_steps only.
    sampler_->weights_changed(state_.step - state_.step % settings_.rollout.server.sync_steps);
    hooks_.say(fmt::format("goes on from {}, {} of {} steps are done", from->string(), state_.step, total_steps_));
  }
  const bool has_metrics = fs::exists(fs::path(settings_.train.output_dir) / "metrics.jsonl");
  journal_ = std::make_unique<Journal>(JournalOptions{.settings = settings_,
                                                      .model_sha256 = decoder_.sha256(),
                                                      .data_sha256 = source_->data_sha256(),
                                                      .resumed_step = state_.step,
                                                      .metrics_bytes = has_metrics ? state_.metrics_bytes : 0,
                                                      .total_steps = total_steps_,
                                                      .unlogged = state_.extra.value("unlogged", nlohmann::json())},
                                       hooks_);
}

void Loop::steps() {
  while (true) {
    if (hooks_.should_stop()) {
      if (state_.step > 0 && state_.step != saved_step_) save();
      return;
    }
    if (evaluation_is_due()) evaluate_now();
    if (save_is_due()) save();
    if (state_.step >= total_steps_) break;
    one_step();
  }
  finished_ = true;
}

bool Loop::save_is_due() const {
  if (state_.step == 0 || state_.step == saved_step_) return false;
  const int64_t every = settings_.train.save_steps;
  return state_.step == total_steps_ || (every > 0 && state_.step % every == 0) || state_.best_step == state_.step;
}

void Loop::begin_generation() {
  before_generation_ = state_;
  DataPosition at{state_.epoch, state_.position};
  const GenerationMaker maker{.settings = settings_,
                              .objective = data_.objective,
                              .decoder = decoder_,
                              .policy = *policy_,
                              .source = *source_,
                              .reference_model = reference_model_.get(),
                              .can_resample = data_.rewards && !settings_.data.rollouts};
  const int64_t failed_before = failed_reward_calls(data_);
  Generation made = maker.make(at);
  made.captured_at = state_.step;
  journal_->rewards(made.batch, state_.step + 1, "train", data_.reward_names);
  generation_figures_ = generation_metrics(made.batch, data_.reward_names, made.truncated);
  generation_figures_["longstraw/seconds/sampling"] = made.sampling_seconds;
  generation_figures_["longstraw/seconds/rewards"] = made.reward_seconds;
  generation_figures_["longstraw/seconds/old_and_reference_logprobs"] = made.scoring_seconds;
  generation_figures_["longstraw/sampled_prompt_tokens"] = double(made.sampled_prompt_tokens);
  // Only then does a run outlive a failed call.
  if (data_.rewards && settings_.data.reward_errors == core::data::RewardErrors::kNull) {
    generation_figures_["longstraw/failed_reward_calls"] = double(failed_reward_calls(data_) - failed_before);
  }
  if (settings_.train.dynamic_sampling_tries > 0) generation_figures_["longstraw/dropped_groups"] = double(made.dropped_groups);
  state_.epoch = at.epoch;
  state_.position = at.taken;
  state_.generation += 1;
  state_.num_tokens += tokens_of(made.batch);
  generation_ = std::move(made);
}

// A step that runs a scoring pass first captures its prompts itself, for both.
Captured Loop::captured_for(const MiniBatch& part) {
  const bool twice = policy_->serves_gradient() && policy_->scores_first(part.batch);
  int64_t budget = settings_.longstraw.memory_budget;
  for (const auto& captured : generation_->captured) budget -= captured ? captured->held_bytes() : 0;
  Captured captured;
  for (size_t i = 0; i < part.groups.size(); ++i) {
    auto& held = generation_->captured[part.groups[i]];
    const auto& group = part.batch[i];
    const bool fits = captured_bytes(decoder_, int64_t(group.prompt_ids.size()), policy_->capture()) <= budget;
    if (!held && twice && fits) {
      size_t longest = 0;
      for (const auto& response : group.responses) longest = std::max(longest, response.completion_ids.size());
      const auto tokens = int64_t(group.prompt_ids.size());
      held = std::make_unique<CapturedPrompt>(
          decoder_, group.prompt_ids,
          CaptureOptions{.longstraw = policy_->capture(), .lengths = {tokens + 1, tokens + int64_t(longest)}});
      budget -= held->held_bytes();
    }
    captured.push_back(held.get());
  }
  return captured;
}

// A prompt's state is good for the weights that made it, unless it may be stale.
void Loop::release_captured() {
  const int64_t next_age = state_.step - generation_->captured_at;
  if (next_age <= settings_.train.stale_steps) return;
  for (auto& captured : generation_->captured) captured.reset();
}

void Loop::one_step() {
  const auto start = Clock::now();
  if (!generation_) begin_generation();
  const int64_t parts = settings_.train.steps_per_generation;
  const MiniBatch part = mini_batch(generation_->batch, generation_->steps_done % parts, parts);
  const int64_t step = state_.step + 1, every = settings_.train.record_gradients_steps;
  StepInputs inputs{.decoder = decoder_,
                    .optimizer = *optimizer_,
                    .policy = *policy_,
                    .objective = data_.objective,
                    .batch = part.batch,
                    .captured = captured_for(part),
                    .non_finite = settings_.train.non_finite,
                    .record = {},
                    .say = hooks_.say,
                    .updating = &writing_};
  if (every > 0 && step % every == 0) {
    inputs.record = [&](const core::model::StepGradient& gradient) {
      journal_->gradient(step, {.decoder = decoder_, .batch = part.batch, .result = gradient});
    };
  }
  hooks_.progress(fmt::format("step {}", step));
  const int64_t age = state_.step - generation_->captured_at;
  Metrics metrics = optimizer_step(inputs);
  const auto stale = metrics.find("longstraw/stale_prompts");
  metrics["longstraw/staleness"] = stale != metrics.end() && stale->second > 0 ? double(age) : 0.0;
  state_.step = step;
  generation_->steps_done += 1;
  release_captured();
  if (reference_model_) reference_model_->after_step(step);
  metrics.merge(generation_figures_);
  generation_figures_.clear();
  if (generation_->steps_done == steps_of_generation(settings_.train)) generation_.reset();
  metrics["step_time"] = std::chrono::duration<double>(Clock::now() - start).count();
  journal_->step(step, metrics, latest());
  sampler_->weights_changed(step);
}

Metrics Loop::latest() const {
  return {
      {"epoch", double(state_.epoch) + double(state_.position) / double(source_->rows())},
      {"num_tokens", double(state_.num_tokens)},
      {"learning_rate", core::optim::learning_rate(settings_.optim, std::max<int64_t>(optimizer_->steps() - 1, 0), total_steps_)}};
}

bool Loop::evaluation_is_due() const {
  if (!data_.eval_prompts || state_.step == 0 || evaluated_step_ == state_.step) return false;
  const int64_t every = settings_.train.eval_steps;
  return state_.step == total_steps_ || (every > 0 && state_.step % every == 0);
}

void Loop::evaluate_now() {
  core::data::RolloutConfig rollout = seeded(settings_.rollout, settings_.train.seed);
  rollout.num_generations = settings_.train.eval_num_generations;
  rollout.temperature = settings_.train.eval_temperature;
  SamplingParts sampling = sampling_;
  sampling.sampler = eval_sampler_.get();
  const std::vector<std::string>& names = data_.rewards->names();  // no penalty here
  const Evaluation evaluation = evaluate(*data_.eval_prompts, rollout, settings_.train.seed, sampling, names);
  journal_->rewards(evaluation.batch, state_.step, "eval", names);
  journal_->evaluation(state_.step, evaluation.metrics);
  evaluated_step_ = state_.step;
  const double reward = evaluation.metrics.at("eval_reward");
  if (settings_.train.save_best && std::isfinite(reward) && (!state_.best_eval || reward > *state_.best_eval)) {
    state_.best_eval = reward;
    state_.best_step = state_.step;
  }
}

void Loop::save() {
  journal_->sync();
  state_.metrics_bytes = journal_->metrics_bytes();
  state_.extra["unlogged"] = journal_->unlogged();
  state_.extra["evaluated_step"] = evaluated_step_;
  state_.extra["generation"] = generation_ ? to_json(*generation_) : nlohmann::json();
  hooks_.progress("saving");
  writing_ = true;
  checkpoint_ = store_.save({.decoder = decoder_,
                             .model_source = settings_.model.path,
                             .adapters = settings_.lora.wanted(),
                             .merged = settings_.train.merge_adapters,
                             .optimizer = *optimizer_,
                             .reference_model = reference_model_ ? reference_model_->changing() : nullptr,
                             .state = state_});
  writing_ = false;
  saved_step_ = state_.step;
}

Outcome train(core::model::Decoder& decoder, Data& data, const Settings& settings, const Hooks& hooks) {
  return Loop(decoder, data, settings, hooks).run();
}

}  // namespace longstraw::training
