#include "longstraw/sweep.h"

#include "longstraw/loss_head.h"
#include "longstraw/run_layers.h"
#include "longstraw/segment_execution.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <optional>

namespace longstraw {
namespace {

using core::model::Decoder;
using StateUse = SegmentExecution::StateUse;

// Adds the seconds of its scope to a phase; waits for the device, so that a phase is charged for its own work.
class PhaseTimer {
 public:
  PhaseTimer(double& seconds, c10::Device device) : seconds_(seconds), device_(device), start_(now()) {}
  ~PhaseTimer() { seconds_ += std::chrono::duration<double>(now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point now() const {
    if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    return std::chrono::steady_clock::now();
  }
  double& seconds_;
  c10::Device device_;
  std::chrono::steady_clock::time_point start_;
};

// A segment's forward pass: where its adjoint and its loss enter the graph.
struct SegmentGraph {
  std::vector<SegmentExecution::OwnState> own_state;
  at::Tensor hidden_SD;  // after the final norm; undefined for a node without a loss
};

class Sweeper {
 public:
  Sweeper(const Decoder& decoder, const core::data::Batch& batch, const TokenTree& tree, const TokenObjective& objective,
          const MemoryPlan& plan, const SweepOptions& options, GradientStore& gradients)
      : decoder_(decoder),
        tree_(tree),
        objective_(objective),
        plan_(plan),
        options_(options),
        gradients_(gradients),
        state_(decoder, tree.state_tokens, tree.adjoint_begin) {
    for (const auto& group : batch) {
      auto& members = result_.logprobs.emplace_back();
      for (const auto& response : group.responses) members.emplace_back(response.completion_ids.size(), 0.0);
    }
  }

  SweepResult run() {
    visit(*tree_.root, /*last=*/true);
    return std::move(result_);
  }

 private:
  // `last`: no node or branch that still has to run hangs above this node. Returns whether anything below has a gradient.
  bool visit(const Node& node, bool last) {
    std::optional<SegmentGraph> kept;
    if (!node.tokens.empty()) kept = capture(node);
    if (last && !node.carries_gradient) state_.forget_before(node.end());
    bool reached = replay(node);
    for (const auto& child : node.children) reached |= visit(*child, last && child == node.children.back());
    const bool own_loss = !node.loss.empty();
    const bool own_gradient = own_loss && has_gradient(node.loss.front());
    if (node.carries_gradient && (reached || own_gradient)) {
      go_backward(node, std::move(kept));
    } else if (own_loss) {
      score(node);
    }
    state_.leave(node.begin);
    return reached || own_gradient;
  }

  std::optional<SegmentGraph> capture(const Node& node) {
    const PhaseTimer timer(result_.capture_seconds, decoder_.device());
    state_.check_weights(decoder_);
    if (node.carries_gradient) state_.zero_adjoint(node.begin, static_cast<int64_t>(node.tokens.size()));
    const bool keep = plan_.keep.contains(&node);
    const at::AutoGradMode grad_mode(keep);
    SegmentGraph graph = run_node(node, StateUse::kWrite, /*with_output=*/keep && !node.loss.empty());
    result_.captured_tokens += static_cast<int64_t>(node.tokens.size());
    if (keep) result_.kept_tokens += static_cast<int64_t>(node.tokens.size());
    report("capture", result_.captured_tokens);
    return keep ? std::optional(std::move(graph)) : std::nullopt;
  }

  bool replay(const Node& node) {
    bool any = false;
    for (const bool with_gradient : {true, false}) {
      std::vector<const Branch*> together;
      const auto flush = [&] {
        if (!together.empty()) replay_together(node, together, with_gradient);
        together.clear();
      };
      for (const Branch& branch : node.branches) {
        if (has_gradient(branch) != with_gradient) continue;
        const bool same_cut = together.empty() || together.front()->adjoint_from == branch.adjoint_from;
        if (!same_cut || static_cast<int64_t>(together.size()) == options_.replay_batch) flush();
        together.push_back(&branch);
        any |= with_gradient;
      }
      flush();
    }
    return any;
  }

  void replay_together(const Node& node, const std::vector<const Branch*>& branches, bool with_gradient) {
    const PhaseTimer timer(result_.replay_seconds, decoder_.device());
    state_.check_weights(decoder_);
    std::vector<int64_t> ids, positions;
    std::vector<Span> spans;
    for (const Branch* branch : branches) {
      spans.push_back({static_cast<int64_t>(ids.size()), static_cast<int64_t>(ids.size() + branch->tokens.size())});
      for (const int64_t token : branch->tokens) {
        positions.push_back(node.end() + static_cast<int64_t>(ids.size()) - spans.back().begin);
        ids.push_back(token);
      }
    }
    const at::AutoGradMode grad_mode(with_gradient);
    const SegmentExecution::Options use{.spans = spans,
                                        .past = {&state_, node.end(), branches.front()->adjoint_from},
                                        .state_use = StateUse::kLeave,
                                        .gradients = &gradients_};
    SegmentExecution execution(use);
    const at::Tensor hidden = run_decoder(ids, positions, execution, {use, branches}, /*with_output=*/true);
    const at::Tensor grad = run_loss(hidden, branches, with_gradient);
    if (with_gradient) torch::autograd::backward({hidden}, {grad});
    result_.replayed_tokens += static_cast<int64_t>(ids.size());
    report("replay", result_.replayed_tokens);
  }

  void go_backward(const Node& node, std::optional<SegmentGraph> graph) {
    const PhaseTimer timer(result_.sweep_seconds, decoder_.device());
    const auto tokens = static_cast<int64_t>(node.tokens.size());
    if (options_.before_backward) options_.before_backward(node, state_);
    if (!graph) {
      const at::AutoGradMode grad_mode(true);
      graph = run_node(node, StateUse::kVerify, /*with_output=*/!node.loss.empty());
      result_.recomputed_tokens += tokens;
    }
    std::vector<at::Tensor> roots, grads;
    if (graph->hidden_SD.defined()) {
      grads.push_back(run_loss(graph->hidden_SD, {&node.loss.front()}, /*with_gradient=*/true));
      roots.push_back(std::move(graph->hidden_SD));
    }
    for (auto& own : graph->own_state) {
      at::Tensor adjoint = own.carried ? state_.carried_adjoint(own.slot, own.part, node.end())
                                       : state_.rows_adjoint(own.slot, own.part, node.begin, tokens).transpose(0, 1);
      if (!adjoint.defined()) continue;  // nobody read it
      grads.push_back(adjoint.to(own.value.scalar_type()));
      roots.push_back(std::move(own.value));
    }
    graph.reset();
    if (!roots.empty()) torch::autograd::backward(roots, grads);
    swept_tokens_ += tokens;
    report("sweep", swept_tokens_);
  }

  // Log-probs of a node with a loss that no gradient reaches.
  void score(const Node& node) {
    const PhaseTimer timer(result_.replay_seconds, decoder_.device());
    const at::NoGradGuard no_grad;
    const SegmentGraph graph = run_node(node, StateUse::kVerify, /*with_output=*/true);
    run_loss(graph.hidden_SD, {&node.loss.front()}, /*with_gradient=*/false);
  }

  SegmentGraph run_node(const Node& node, StateUse use, bool with_output) {
    const auto tokens = static_cast<int64_t>(node.tokens.size());
    const SegmentExecution::Options options{.spans = {{0, tokens}},
                                            .past = {&state_, node.begin, node.carries_gradient ? node.adjoint_from : INT64_MAX},
                                            .state_use = use,
                                            .gradients = &gradients_};
    SegmentExecution execution(options);
    ForwardPass pass{options, {}};
    if (with_output) pass.branches = {&node.loss.front()};
    SegmentGraph graph;
    graph.hidden_SD = run_decoder(node.tokens, positions_from(node.begin, tokens), execution, pass, with_output);
    graph.own_state = execution.own_state();
    result_.recompute_mismatches += execution.mismatches();
    result_.changed_choices += execution.changed_choices();
    result_.state_bytes = std::max(result_.state_bytes, state_.state_bytes());
    result_.adjoint_bytes = std::max(result_.adjoint_bytes, state_.adjoint_bytes());
    return graph;
  }

  at::Tensor run_decoder(const std::vector<int64_t>& ids, const std::vector<int64_t>& positions, SegmentExecution& execution,
                         const ForwardPass& pass, bool with_output) {
    const std::unique_ptr<core::model::Execution> around = options_.around ? options_.around(execution, pass) : nullptr;
    core::model::Execution& outermost = around ? *around : execution;
    return run_layers(decoder_, ids, positions, options_.lengths, outermost, with_output);
  }

  // Losses and log-probs of branches whose tokens are the rows of `hidden`, one after another.
  at::Tensor run_loss(const at::Tensor& hidden_SD, const std::vector<const Branch*>& branches, bool with_gradient) {
    std::vector<int64_t> targets;
    std::vector<std::pair<const Branch*, int64_t>> rows;
    for (const Branch* branch : branches) {
      targets.insert(targets.end(), branch->targets.begin(), branch->targets.end());
      for (size_t j = 0; j < branch->targets.size(); ++j) rows.emplace_back(branch, branch->first_target + static_cast<int64_t>(j));
    }
    const auto loss = [&](int64_t begin, const std::vector<double>& logprobs, const std::vector<double>&) {
      RowDerivatives derivatives;
      for (size_t i = 0; i < logprobs.size(); ++i) {
        const auto& [branch, index] = rows[begin + static_cast<int64_t>(i)];
        const TokenLoss token = objective_.token(branch->prompt, branch->member, index, logprobs[i], 0.0);
        result_.logprobs[branch->prompt][branch->member][index] = logprobs[i];
        result_.policy += token.policy;
        result_.kl += token.kl;
        derivatives.by_logprob.push_back(token.derivative);
      }
      return derivatives;
    };
    return loss_head(decoder_, hidden_SD.detach(), at::tensor(targets, at::kLong).to(decoder_.device()),
                     {.temperature = objective_.temperature()}, loss, with_gradient ? &gradients_ : nullptr);
  }

  bool has_gradient(const Branch& branch) const { return objective_.has_gradient(branch.prompt, branch.member); }
  void report(const char* phase, int64_t tokens) const {
    if (options_.progress) options_.progress(phase, tokens);
  }

  const Decoder& decoder_;
  const TokenTree& tree_;
  const TokenObjective& objective_;
  const MemoryPlan& plan_;
  const SweepOptions& options_;
  GradientStore& gradients_;
  PromptState state_;
  SweepResult result_;
  int64_t swept_tokens_ = 0;
};

}  // namespace

SweepResult sweep(const Decoder& decoder, const core::data::Batch& batch, const TokenTree& tree, const TokenObjective& objective,
                  const MemoryPlan& plan, const SweepOptions& options, GradientStore& gradients) {
  return Sweeper(decoder, batch, tree, objective, plan, options, gradients).run();
}

}  // namespace longstraw
