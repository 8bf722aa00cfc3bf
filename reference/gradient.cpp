#include "reference/gradient.h"

#include "core/base/errors.h"
#include "core/device/device.h"
#include "core/device/memory_meter.h"
#include "reference/objective.h"
#include "reference/whole_sequence.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <limits>

namespace longstraw::reference {

using core::data::Batch;
using core::data::PromptGroup;
using core::data::Response;
using core::model::Decoder;
using core::model::SequenceLengths;
using core::model::StepGradient;

namespace {

// Of each token of a response.
struct Scores {
  at::Tensor logprobs_R;
  at::Tensor entropies_R;  // undefined unless wanted
};

enum class Entropy { kNone, kValue, kGraph };

// One response's loss from its scores: its parts by name; the loss is their sum.
using LossParts = std::vector<std::pair<std::string, at::Tensor>>;
using ResponseLoss = std::function<LossParts(size_t prompt, size_t member, const Scores& scores)>;
// Whether a response's loss depends on the weights at all.
using HasGradient = std::function<bool(size_t prompt, size_t member)>;

class Stopwatch {
 public:
  explicit Stopwatch(at::Device device) : device_(device), start_(now()) {}
  double seconds() const { return std::chrono::duration<double>(now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point now() const {
    if (!device_.is_cpu()) {
      const c10::impl::VirtualGuardImpl guard(device_.type());
      guard.synchronizeDevice(device_.has_index() ? device_.index() : guard.getDevice().index());
    }
    return std::chrono::steady_clock::now();
  }
  at::Device device_;
  std::chrono::steady_clock::time_point start_;
};

void check_ids(const std::vector<int64_t>& ids, int64_t vocab, const std::string& what) {
  if (ids.empty()) throw FormatError(what + ": empty, wanted at least one token");
  const auto outside = std::find_if(ids.begin(), ids.end(), [&](int64_t id) { return id < 0 || id >= vocab; });
  if (outside != ids.end()) {
    throw FormatError(
        fmt::format("{}: id {} at {}, wanted 0 to {} (the model's vocabulary)", what, *outside, outside - ids.begin(), vocab - 1));
  }
}

SequenceLengths checked_lengths(const Decoder& decoder, const Batch& batch) {
  SequenceLengths lengths{std::numeric_limits<int64_t>::max(), 0};
  const int64_t vocab = decoder.architecture().vocab;
  for (const PromptGroup& group : batch) {
    check_ids(group.prompt_ids, vocab, fmt::format("prompt {}", group.prompt_id));
    for (size_t member = 0; member < group.responses.size(); ++member) {
      const auto& ids = group.responses[member].completion_ids;
      check_ids(ids, vocab, fmt::format("prompt {} response {}", group.prompt_id, member));
      const auto length = int64_t(group.prompt_ids.size() + ids.size());
      lengths.shortest = std::min(lengths.shortest, length);
      lengths.longest = std::max(lengths.longest, length);
    }
  }
  return lengths;
}

at::Tensor id_tensor(std::span<const int64_t> ids, at::Device device) {
  return at::tensor(at::ArrayRef<int64_t>(ids.data(), ids.size()), at::kLong).to(device);
}

at::Tensor entropies_of(const at::Tensor& shifted_RV, const at::Tensor& log_sum_R1) {
  const at::Tensor logprobs_RV = shifted_RV - log_sum_R1;
  return -(logprobs_RV.exp() * logprobs_RV).sum(-1);
}

Scores response_scores(const at::Tensor& logits_RV, const at::Tensor& ids_R, double temperature, Entropy entropy) {
  const at::Tensor scaled_RV = logits_RV.to(core::device::accumulation_dtype(logits_RV.scalar_type())) / temperature;
  // Not at::log_softmax: its float32 sum over a large vocabulary is a plain running one, too small by some 1e-5 of itself,
  // and so are all its log-probs off to one side. at::sum is pairwise.
  const at::Tensor shifted_RV = scaled_RV - scaled_RV.detach().amax(-1, /*keepdim=*/true);
  const at::Tensor log_sum_R1 = shifted_RV.exp().sum(-1, /*keepdim=*/true).log();
  Scores scores{(shifted_RV.gather(-1, ids_R.unsqueeze(1)) - log_sum_R1).squeeze(1), {}};
  if (entropy == Entropy::kGraph) scores.entropies_R = entropies_of(shifted_RV, log_sum_R1);
  if (entropy == Entropy::kValue) scores.entropies_R = entropies_of(shifted_RV.detach(), log_sum_R1.detach());
  return scores;
}

std::vector<double> numbers(const at::Tensor& values_R) {
  const at::Tensor kept_R = values_R.detach().to(at::kCPU, at::kDouble).contiguous();
  return {kept_R.const_data_ptr<double>(), kept_R.const_data_ptr<double>() + kept_R.numel()};
}

class Trainer {
 public:
  Trainer(const Decoder& decoder, const Batch& batch, const RunOptions& options, double temperature, Entropy entropy)
      : decoder_(decoder),
        batch_(batch),
        options_(options),
        temperature_(temperature),
        entropy_(entropy),
        lengths_(checked_lengths(decoder, batch)) {}

  StepGradient run(const ResponseLoss& response_loss, const HasGradient& has_gradient = {}) {
    const core::device::MemoryMeter meter(decoder_.device());
    const int64_t alive_before = meter.live_bytes();
    meter.reset_peak();
    const Stopwatch total(decoder_.device());
    const at::ScalarType dtype = core::device::accumulation_dtype(decoder_.dtype());
    for (const auto& parameter : decoder_.parameters()) {
      weights_.push_back(parameter->value);
      result_.gradients.push_back(
          at::zeros(parameter->value.sizes(), parameter->value.options().dtype(dtype).requires_grad(false)));
    }
    for (size_t prompt = 0; prompt < batch_.size(); ++prompt) {
      result_.logprobs.emplace_back();
      if (entropy_ != Entropy::kNone) result_.entropies.emplace_back();
      if (options_.trace) result_.traces.emplace_back();
      for (size_t member = 0; member < batch_[prompt].responses.size(); ++member)
        one_response(prompt, member, response_loss, !has_gradient || has_gradient(prompt, member));
    }
    result_.seconds["total"] = total.seconds();
    result_.bytes["peak_bytes"] = meter.peak_bytes() - alive_before;
    return std::move(result_);
  }

 private:
  void one_response(size_t prompt, size_t member, const ResponseLoss& response_loss, bool has_gradient) {
    const PromptGroup& group = batch_[prompt];
    const std::vector<int64_t>& completion = group.responses[member].completion_ids;
    const at::AutoGradMode graph(has_gradient);

    const Stopwatch forward(decoder_.device());
    core::model::TracePoints points;
    const at::Tensor logits_RV =
        response_logits(decoder_, group.prompt_ids, completion, lengths_, options_, options_.trace ? &points : nullptr);
    if (options_.trace) result_.traces.back().push_back(points.trace(0, int64_t(completion.size())));
    const Scores scores = response_scores(logits_RV, id_tensor(completion, decoder_.device()), temperature_, entropy_);
    at::Tensor loss;
    for (const auto& [name, part] : response_loss(prompt, member, scores)) {
      loss = loss.defined() ? loss + part : part;
      result_.loss_parts[name] += part.item<double>();
    }
    result_.loss += loss.item<double>();
    result_.logprobs.back().push_back(numbers(scores.logprobs_R));
    if (scores.entropies_R.defined()) result_.entropies.back().push_back(numbers(scores.entropies_R));
    result_.seconds["forward"] += forward.seconds();

    result_.facts["responses"] += 1;
    result_.facts["tokens"] += double(group.prompt_ids.size() + completion.size());
    if (!has_gradient) return;

    const Stopwatch backward(decoder_.device());
    // Not .backward(): it would sum bfloat16 weights' gradients over responses in bfloat16.
    const auto gradients = torch::autograd::grad({loss}, weights_, {}, std::nullopt, false, /*allow_unused=*/true);
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) result_.gradients[i].add_(gradients[i]);
    }
    result_.seconds["backward"] += backward.seconds();
  }

  const Decoder& decoder_;
  const Batch& batch_;
  RunOptions options_;
  double temperature_;
  Entropy entropy_;
  SequenceLengths lengths_;
  std::vector<at::Tensor> weights_;
  StepGradient result_;
};

}  // namespace

at::Tensor response_logits(const Decoder& decoder, std::span<const int64_t> prompt_ids, std::span<const int64_t> completion_ids,
                           SequenceLengths lengths, const RunOptions& options, core::model::TracePoints* points) {
  const auto prompt_tokens = int64_t(prompt_ids.size());
  const auto response_tokens = int64_t(completion_ids.size());
  const int64_t state_tokens = prompt_tokens - 1;
  const int64_t cut = options.tail_tokens ? std::max<int64_t>(0, state_tokens - *options.tail_tokens) : 0;
  WholeSequence whole(options.attention, cut);
  std::optional<core::model::TracedExecution> traced;
  if (points) traced.emplace(whole, *points, state_tokens, response_tokens);
  core::model::Execution& execution = traced ? static_cast<core::model::Execution&>(*traced) : whole;

  const at::Tensor ids_S = at::cat({id_tensor(prompt_ids, decoder.device()), id_tensor(completion_ids, decoder.device())});
  const auto where = decoder.positions(at::arange(ids_S.size(0), at::kLong), lengths);
  at::Tensor hidden_SD = decoder.embed(ids_S, execution);
  for (int64_t n = 0; n < decoder.layers(); ++n) hidden_SD = decoder.layer(n, hidden_SD, where, execution);

  // The last prompt token predicts the first response token; the last response token predicts nothing.
  const at::Tensor predicting_RD = hidden_SD.narrow(0, prompt_tokens - 1, response_tokens);
  if (traced) traced->rows_are_narrowed();
  return whole.linear(decoder.final_norm(predicting_RD, execution), decoder.output_weight(), nullptr);
}

core::model::TokenScores reference_scores(const Decoder& decoder, const Batch& batch, const ReferenceOptions& options) {
  const at::NoGradGuard no_graph;
  const SequenceLengths lengths = checked_lengths(decoder, batch);
  const bool entropy = options.entropy || options.objective.top_entropy_quantile < 1;
  core::model::TokenScores result;
  for (const PromptGroup& group : batch) {
    result.logprobs.emplace_back();
    if (entropy) result.entropies.emplace_back();
    for (const Response& response : group.responses) {
      const at::Tensor logits_RV = response_logits(decoder, group.prompt_ids, response.completion_ids, lengths, options.run);
      const Scores scores = response_scores(logits_RV, id_tensor(response.completion_ids, decoder.device()), options.temperature,
                                            entropy ? Entropy::kValue : Entropy::kNone);
      result.logprobs.back().push_back(numbers(scores.logprobs_R));
      if (entropy) result.entropies.back().push_back(numbers(scores.entropies_R));
    }
  }
  return result;
}

StepGradient reference_gradient(const Decoder& decoder, const Batch& batch, const ReferenceOptions& options) {
  core::model::TokenScores scores;
  const Stopwatch scoring(decoder.device());
  const bool scores_first = needs_scores_first(batch, options.objective);
  if (scores_first) scores = reference_scores(decoder, batch, options);
  const double scoring_seconds = scoring.seconds();

  const BatchObjective objective(batch, options.objective, options.max_completion_length, scores);
  const Entropy entropy =
      objective.wants_entropy() ? Entropy::kGraph : (options.entropy || scores_first ? Entropy::kValue : Entropy::kNone);
  Trainer trainer(decoder, batch, options.run, options.temperature, entropy);
  const auto loss = [&](size_t prompt, size_t member, const Scores& of_response) {
    const auto share = objective.share(prompt, member, of_response.logprobs_R, of_response.entropies_R);
    LossParts parts{{"policy", share.policy}};
    if (share.kl.defined()) parts.emplace_back("kl", share.kl);
    if (share.entropy.defined()) parts.emplace_back("entropy", share.entropy);
    return parts;
  };
  StepGradient step = trainer.run(loss, [&](size_t prompt, size_t member) { return objective.has_gradient(prompt, member); });
  step.advantages = objective.advantages();
  if (scores_first) {
    step.seconds["scoring"] = scoring_seconds;
    step.seconds["total"] += scoring_seconds;
  }
  return step;
}

StepGradient weighted_gradient(const Decoder& decoder, const Batch& batch, const TokenWeights& weights, const RunOptions& options,
                               double temperature) {
  Trainer trainer(decoder, batch, options, temperature, Entropy::kNone);
  return trainer.run([&](size_t prompt, size_t member, const Scores& scores) {
    const at::Tensor& logprobs_R = scores.logprobs_R;
    const auto& row = weights.at(prompt).at(member);
    if (int64_t(row.size()) != logprobs_R.numel()) {
      throw ConfigError(fmt::format("prompt {} response {}: {} weights for {} tokens", batch[prompt].prompt_id, member, row.size(),
                                    logprobs_R.numel()));
    }
    const at::Tensor weights_R = at::tensor(at::ArrayRef<double>(row), at::kDouble).to(logprobs_R.options());
    return LossParts{{"weighted", -(weights_R * logprobs_R).sum()}};
  });
}

}  // namespace longstraw::reference
