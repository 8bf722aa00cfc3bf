#include "longstraw/sweep.h"

#include "longstraw/loss_head.h"
#include "longstraw/prompt_capture.h"
#include "longstraw/run_layers.h"
#include "longstraw/segment_execution.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <utility>

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

// A captured prompt while a sweep uses it: made ready, and left as it was found.
class CaptureInUse {
 public:
  CaptureInUse(PromptCapture& capture, const TokenTree& tree, GradientStore* gradients) : capture_(capture) {
    capture_.state.reserve(tree.state_tokens);
    capture_.gradients.pass_on_to(gradients);
  }
  ~CaptureInUse() {
    capture_.gradients.pass_on_to(nullptr);
    capture_.state.close_adjoint();
    capture_.state.leave(capture_.tokens);
    capture_.state.drop_blocks_from(capture_.tokens);
  }
  CaptureInUse(const CaptureInUse&) = delete;
  CaptureInUse& operator=(const CaptureInUse&) = delete;

 private:
  PromptCapture& capture_;
};

class Sweeper {
 public:
  Sweeper(const SweepInput& input, SweepResult& result)
      : decoder_(input.decoder),
        tree_(input.tree),
        objective_(input.objective),
        plan_(input.plan),
        options_(input.options),
        gradients_(input.gradients),
        captured_(input.options.captured),
        result_(result) {
    // A pass for scores alone recomputes nothing: it needs no choices.
    if (captured_ != nullptr) in_use_.emplace(*captured_, tree_, gradients_);
    else own_state_.emplace(decoder_, tree_.state_tokens, gradients_ != nullptr ? tree_.adjoint_begin : tree_.state_tokens);
    state_ = captured_ != nullptr ? &captured_->state : &*own_state_;
    if (gradients_ != nullptr) state_->open_adjoint(tree_.adjoint_begin);
    wants_entropy_ = options_.entropy || objective_.wants_entropy();
    make_room(result_.logprobs, input.batch);
    if (wants_entropy_) make_room(result_.entropies, input.batch);
  }

  void run() { visit(*tree_.root, /*last=*/true); }

 private:
  static void make_room(TokenValues& values, const core::data::Batch& batch) {
    if (!values.empty()) return;
    for (const auto& group : batch) {
      auto& members = values.emplace_back();
      for (const auto& response : group.responses) members.emplace_back(response.completion_ids.size(), 0.0);
    }
  }

  // `last`: no node or branch that still has to run hangs above this node. Returns whether anything below has a gradient.
  bool visit(const Node& node, bool last) {
    const bool own_loss = !node.loss.empty();
    // What hangs below a node with a loss is the rest of that response.
    const bool own_gradient = own_loss && has_gradient(node.loss.front());
    const bool was_captured = captured_ != nullptr && !own_loss;
    std::optional<SegmentGraph> kept;
    if (was_captured) reuse(node);
    else if (own_loss && !own_gradient) score(node);
    else if (!node.tokens.empty()) kept = capture(node);
    if (last && captured_ == nullptr && (!node.carries_gradient || gradients_ == nullptr)) state_->forget_before(node.end());
    bool reached = replay(node);
    for (const auto& child : node.children) reached |= visit(*child, last && child == node.children.back());
    if (node.carries_gradient && (reached || own_gradient)) go_backward(node, std::move(kept));
    if (was_captured) state_->leave_captured(node.begin);
    else state_->leave(node.begin);
    return reached || own_gradient;
  }

  void reuse(const Node& node) {
    check_weights();
    const auto tokens = static_cast<int64_t>(node.tokens.size());
    if (node.carries_gradient) state_->zero_adjoint(node.begin, tokens);
    result_.reused_tokens += tokens;
    note_bytes();
  }

  std::optional<SegmentGraph> capture(const Node& node) {
    const bool is_prompt = node.loss.empty();
    const PhaseTimer timer(is_prompt ? result_.capture_seconds : result_.replay_seconds, decoder_.device());
    check_weights();
    const auto tokens = static_cast<int64_t>(node.tokens.size());
    if (node.carries_gradient) state_->zero_adjoint(node.begin, tokens);
    const bool keep = gradients_ != nullptr && plan_.keep.contains(&node);
    const at::AutoGradMode grad_mode(keep);
    SegmentGraph graph = run(node, StateUse::kWrite, /*with_output=*/keep && !is_prompt);
    if (keep) result_.kept_tokens += tokens;
    count_forward(node);
    return keep ? std::optional(std::move(graph)) : std::nullopt;
  }

  // A node with a loss that no gradient reaches: its log-probs, and what it leaves for the rest of its response.
  void score(const Node& node) {
    const PhaseTimer timer(result_.replay_seconds, decoder_.device());
    check_weights();
    const at::NoGradGuard no_grad;
    const SegmentGraph graph = run(node, StateUse::kWrite, /*with_output=*/true);
    run_loss(graph.hidden_SD, {&node.loss.front()}, /*with_gradient=*/false);
    count_forward(node);
  }

  void count_forward(const Node& node) {
    const auto tokens = static_cast<int64_t>(node.tokens.size());
    const bool is_prompt = node.loss.empty();
    (is_prompt ? result_.captured_tokens : result_.replayed_tokens) += tokens;
    if (is_prompt) report("capture", result_.captured_tokens);
    else report("replay", result_.replayed_tokens);
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
    check_weights();
    std::vector<const Branch*> distinct;
    const std::vector<int64_t> rows = rows_of(branches, distinct);
    std::vector<int64_t> ids, positions;
    std::vector<Span> spans;
    for (const Branch* branch : distinct) {
      spans.push_back({static_cast<int64_t>(ids.size()), static_cast<int64_t>(ids.size() + branch->tokens.size())});
      for (const int64_t token : branch->tokens) {
        positions.push_back(node.end() + static_cast<int64_t>(ids.size()) - spans.back().begin);
        ids.push_back(token);
      }
    }
    const at::AutoGradMode grad_mode(with_gradient);
    const SegmentExecution::Options use{.spans = spans,
                                        .past = {state_, node.end(), branches.front()->adjoint_from},
                                        .state_use = StateUse::kLeave,
                                        .gradients = gradients_};
    SegmentExecution execution(use);
    const auto around = options_.around ? options_.around(execution, {use, distinct}) : nullptr;
    core::model::Execution& outermost = around ? *around : execution;
    const at::Tensor hidden = run_layers(decoder_, ids, positions, options_.lengths, outermost, /*with_output=*/true);
    const bool shared = distinct.size() < branches.size();
    const at::Tensor index = shared ? at::tensor(rows, at::kLong).to(decoder_.device()) : at::Tensor();
    at::Tensor grad = run_loss(shared ? hidden.detach().index_select(0, index) : hidden, branches, with_gradient);
    if (with_gradient && shared) grad = at::zeros_like(hidden, grad.options()).index_add_(0, index, grad);
    if (with_gradient) torch::autograd::backward({hidden}, {grad});
    result_.replayed_tokens += static_cast<int64_t>(ids.size());
    report("replay", result_.replayed_tokens);
  }

  // Responses of one token each, or equal ones but for their last, feed the same tokens: they are run once. For each row of
  // `branches`, one after another, its row among the distinct ones. Traces are a number of each response, so those run by
  // themselves.
  std::vector<int64_t> rows_of(const std::vector<const Branch*>& branches, std::vector<const Branch*>& distinct) const {
    std::map<std::vector<int64_t>, int64_t> first_row;
    std::vector<int64_t> rows;
    int64_t next = 0;
    for (const Branch* branch : branches) {
      const auto [found, is_new] = options_.around ? std::pair(first_row.end(), true) : first_row.try_emplace(branch->tokens, next);
      const int64_t first = is_new ? next : found->second;
      for (size_t j = 0; j < branch->tokens.size(); ++j) rows.push_back(first + static_cast<int64_t>(j));
      if (!is_new) continue;
      distinct.push_back(branch);
      next += static_cast<int64_t>(branch->tokens.size());
    }
    return rows;
  }

  void go_backward(const Node& node, std::optional<SegmentGraph> graph) {
    const PhaseTimer timer(result_.sweep_seconds, decoder_.device());
    const auto tokens = static_cast<int64_t>(node.tokens.size());
    if (options_.before_backward) options_.before_backward(node, *state_);
    if (!graph) graph = kept_since_capture(node);
    if (!graph) {
      const at::AutoGradMode grad_mode(true);
      graph = run(node, StateUse::kVerify, /*with_output=*/!node.loss.empty());
      result_.recomputed_tokens += tokens;
    }
    std::vector<at::Tensor> roots, grads;
    if (graph->hidden_SD.defined()) {
      grads.push_back(run_loss(graph->hidden_SD, {&node.loss.front()}, /*with_gradient=*/true));
      roots.push_back(std::move(graph->hidden_SD));
    }
    for (auto& own : graph->own_state) {
      at::Tensor adjoint = own.carried ? state_->carried_adjoint(own.slot, own.part, node.end())
                                       : state_->rows_adjoint(own.slot, own.part, node.begin, tokens).transpose(0, 1);
      if (!adjoint.defined()) continue;  // nobody read it
      grads.push_back(adjoint.to(own.value.scalar_type()));
      roots.push_back(std::move(own.value));
    }
    graph.reset();
    if (!roots.empty()) torch::autograd::backward(roots, grads);
    result_.swept_tokens += tokens;
    report("sweep", result_.swept_tokens);
  }

  std::optional<SegmentGraph> kept_since_capture(const Node& node) {
    if (captured_ == nullptr || !node.loss.empty()) return std::nullopt;
    auto found = captured_->kept.extract(node.begin);
    if (!found) return std::nullopt;
    result_.kept_tokens += static_cast<int64_t>(node.tokens.size());
    return std::move(found.mapped());
  }

  SegmentGraph run(const Node& node, StateUse use, bool with_output) {
    const NodeRun how{
        .use = use, .with_output = with_output, .gradients = gradients_, .lengths = options_.lengths, .around = &options_.around};
    SegmentGraph graph = run_node(decoder_, node, *state_, how);
    result_.recompute_mismatches += graph.mismatches;
    result_.changed_choices += graph.changed_choices;
    note_bytes();
    return graph;
  }

  void note_bytes() {
    result_.state_bytes = std::max(result_.state_bytes, state_->state_bytes());
    result_.adjoint_bytes = std::max(result_.adjoint_bytes, state_->adjoint_bytes());
  }

  // Losses and log-probs of branches whose tokens are the rows of `hidden`, one after another.
  at::Tensor run_loss(const at::Tensor& hidden_SD, const std::vector<const Branch*>& branches, bool with_gradient) {
    std::vector<int64_t> targets;
    std::vector<std::pair<const Branch*, int64_t>> rows;
    for (const Branch* branch : branches) {
      targets.insert(targets.end(), branch->targets.begin(), branch->targets.end());
      for (size_t j = 0; j < branch->targets.size(); ++j) rows.emplace_back(branch, branch->first_target + static_cast<int64_t>(j));
    }
    const auto loss = [&](int64_t begin, const std::vector<double>& logprobs, const std::vector<double>& entropies) {
      RowDerivatives derivatives;
      for (size_t i = 0; i < logprobs.size(); ++i) {
        const auto& [branch, index] = rows[begin + static_cast<int64_t>(i)];
        const double entropy = entropies.empty() ? 0.0 : entropies[i];
        const TokenLoss token = objective_.token(branch->prompt, branch->member, index, logprobs[i], entropy);
        result_.logprobs[branch->prompt][branch->member][index] = logprobs[i];
        if (wants_entropy_) result_.entropies[branch->prompt][branch->member][index] = entropy;
        result_.policy += token.policy;
        result_.kl += token.kl;
        result_.entropy += token.entropy;
        derivatives.by_logprob.push_back(token.derivative);
        if (objective_.wants_entropy()) derivatives.by_entropy.push_back(token.entropy_derivative);
      }
      return derivatives;
    };
    return loss_head(decoder_, hidden_SD.detach(), at::tensor(targets, at::kLong).to(decoder_.device()),
                     {.temperature = objective_.temperature(), .entropy = wants_entropy_}, loss,
                     with_gradient ? gradients_ : nullptr);
  }

  bool has_gradient(const Branch& branch) const {
    return gradients_ != nullptr && objective_.has_gradient(branch.prompt, branch.member);
  }
  void check_weights() const {
    if (!options_.stale) state_->check_weights(decoder_);
  }
  void report(const char* phase, int64_t tokens) const {
    if (options_.progress) options_.progress(phase, tokens);
  }

  const Decoder& decoder_;
  const TokenTree& tree_;
  const TokenObjective& objective_;
  const MemoryPlan& plan_;
  const SweepOptions& options_;
  GradientStore* gradients_;
  PromptCapture* captured_;
  std::optional<PromptState> own_state_;
  std::optional<CaptureInUse> in_use_;
  PromptState* state_ = nullptr;
  SweepResult& result_;
  bool wants_entropy_ = false;
};

}  // namespace

void sweep(const SweepInput& input, SweepResult& result) { Sweeper(input, result).run(); }

SweepResult sweep(const Decoder& decoder, const core::data::Batch& batch, const TokenTree& tree, const TokenObjective& objective,
                  const MemoryPlan& plan, const SweepOptions& options, GradientStore& gradients) {
  SweepResult result;
  sweep({decoder, batch, tree, objective, plan, options, &gradients}, result);
  return result;
}

}  // namespace longstraw
