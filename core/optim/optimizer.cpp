#include "core/optim/optimizer.h"

#include "core/base/errors.h"
#include "core/device/device.h"
#include "core/model/safetensors.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <regex>

namespace longstraw::core::optim {

namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using torch::optim::SGDParamState;

std::unique_ptr<torch::optim::OptimizerOptions> options_of(const OptimConfig& config, double weight_decay) {
  if (config.optim == OptimizerName::kAdamw) {
    return std::make_unique<AdamWOptions>(AdamWOptions(config.learning_rate)
                                              .betas({config.adam_beta1, config.adam_beta2})
                                              .eps(config.adam_epsilon)
                                              .weight_decay(weight_decay));
  }
  return std::make_unique<SGDOptions>(SGDOptions(config.learning_rate).momentum(config.sgd_momentum).weight_decay(weight_decay));
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const OptimConfig& config, const std::vector<OptimizerParamGroup>& groups) {
  if (config.optim == OptimizerName::kAdamw) return std::make_unique<AdamW>(groups, AdamWOptions(config.learning_rate));
  return std::make_unique<SGD>(groups, SGDOptions(config.learning_rate));
}

void check_betas(const OptimConfig& config) {
  if (config.optim != OptimizerName::kAdamw) return;
  for (const auto& [name, beta] : {std::pair{"adam_beta1", config.adam_beta1}, std::pair{"adam_beta2", config.adam_beta2}}) {
    if (beta == 1.0) throw ConfigError(fmt::format("optim.{}: 1, wanted below 1: the moment would never change", name));
  }
}

std::string describe(const at::Tensor& tensor) {
  return fmt::format("{} of {}", model::to_string(tensor.sizes().vec()), c10::toString(tensor.scalar_type()));
}

}  // namespace

bool is_decayed(const std::string& parameter) {
  static const std::regex spared(R"(bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.))", std::regex::icase);
  return !std::regex_search(parameter, spared);
}

struct Optimizer::Impl {
  struct Trained {
    std::string name;
    at::Tensor weight;
    at::Tensor master;  // the weight itself where that is wide
    bool has_master() const { return !master.is_same(weight); }
  };

  // An entry of the state: where it lies, or where it is to come.
  using Moments = std::vector<std::pair<std::string, at::Tensor>>;
  Moments moments(const Trained& trained) const;
  std::vector<std::string> moment_names() const;
  void set_moments(const Trained& trained, const std::map<std::string, at::Tensor>& state);
  void write_weights();

  OptimConfig config;
  std::int64_t total_steps = 0;
  std::int64_t steps = 0;
  std::vector<Trained> trained;
  std::unique_ptr<torch::optim::Optimizer> torch;
};

// What torch::optim keeps of a parameter; nothing before its first step.
Optimizer::Impl::Moments Optimizer::Impl::moments(const Trained& trained) const {
  const auto found = torch->state().find(trained.master.unsafeGetTensorImpl());
  if (found == torch->state().end()) return {};
  if (config.optim == OptimizerName::kAdamw) {
    const auto& kept = static_cast<const AdamWParamState&>(*found->second);
    return {{"exp_avg", kept.exp_avg()}, {"exp_avg_sq", kept.exp_avg_sq()}};
  }
  const auto& kept = static_cast<const SGDParamState&>(*found->second);
  return kept.momentum_buffer().defined() ? Moments{{"momentum_buffer", kept.momentum_buffer()}} : Moments{};
}

std::vector<std::string> Optimizer::Impl::moment_names() const {
  if (config.optim == OptimizerName::kAdamw) return {"exp_avg", "exp_avg_sq"};
  return config.sgd_momentum != 0.0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
}

void Optimizer::Impl::set_moments(const Trained& trained, const std::map<std::string, at::Tensor>& state) {
  // A copy of its own: the file it may have been read from goes.
  const auto entry = [&](const char* name) {
    return state.at(fmt::format("{}/{}", name, trained.name))
        .to(trained.master.device(), trained.master.scalar_type(), false, true);
  };
  std::unique_ptr<torch::optim::OptimizerParamState> kept;
  if (config.optim == OptimizerName::kAdamw) {
    auto adam = std::make_unique<AdamWParamState>();
    adam->step(steps);
    adam->exp_avg(entry("exp_avg"));
    adam->exp_avg_sq(entry("exp_avg_sq"));
    kept = std::move(adam);
  } else {
    auto sgd = std::make_unique<SGDParamState>();
    sgd->momentum_buffer(entry("momentum_buffer"));
    kept = std::move(sgd);
  }
  torch->state()[trained.master.unsafeGetTensorImpl()] = std::move(kept);
}

void Optimizer::Impl::write_weights() {
  for (Trained& parameter : trained) {
    if (parameter.has_master()) {
      parameter.weight.copy_(parameter.master);
    } else {
      // torch::optim changes it through data(), which leaves the version as it was.
      parameter.weight.unsafeGetTensorImpl()->bump_version();
    }
  }
}

Optimizer::Optimizer(model::Decoder& decoder, const OptimConfig& config, std::int64_t total_steps)
    : impl_(std::make_unique<Impl>()) {
  check_betas(config);
  impl_->config = config;
  impl_->total_steps = total_steps;
  const auto wide = device::accumulation_dtype(decoder.dtype());
  std::vector<at::Tensor> decayed, spared;
  for (const auto& parameter : decoder.parameters()) {
    const at::Tensor master = parameter->value.scalar_type() == wide ? parameter->value : parameter->value.detach().to(wide);
    impl_->trained.push_back({parameter->name, parameter->value, master});
    (is_decayed(parameter->name) ? decayed : spared).push_back(master);
  }
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::move(decayed), options_of(config, config.weight_decay));
  groups.emplace_back(std::move(spared), options_of(config, 0.0));
  impl_->torch = make_optimizer(config, groups);
}

Optimizer::~Optimizer() = default;

std::int64_t Optimizer::steps() const { return impl_->steps; }

StepReport Optimizer::step(std::vector<at::Tensor> gradients) {
  const at::NoGradGuard no_grad;
  Impl& s = *impl_;
  TORCH_CHECK(gradients.size() == s.trained.size(), gradients.size(), " gradients for ", s.trained.size(), " parameters");
  StepReport report{.grad_norm = global_norm(gradients), .learning_rate = learning_rate(s.config, s.steps, s.total_steps)};
  const double scale = s.config.max_grad_norm > 0 ? s.config.max_grad_norm / (report.grad_norm + 1e-6) : 1.0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    at::Tensor gradient = gradients[i].detach().to(s.trained[i].master.options());
    if (scale < 1.0) gradient.mul_(scale);
    s.trained[i].master.mutable_grad() = std::move(gradient);
    gradients[i].reset();
  }
  for (auto& group : s.torch->param_groups()) group.options().set_lr(report.learning_rate);
  s.torch->step();
  s.torch->zero_grad(/*set_to_none=*/true);
  s.write_weights();
  ++s.steps;
  return report;
}

std::map<std::string, at::Tensor> Optimizer::state() const {
  std::map<std::string, at::Tensor> state;
  for (const Impl::Trained& parameter : impl_->trained) {
    if (parameter.has_master()) state["masters/" + parameter.name] = parameter.master.detach().cpu();
    for (const auto& [moment, value] : impl_->moments(parameter)) state[moment + "/" + parameter.name] = value.detach().cpu();
  }
  return state;
}

void Optimizer::load_state(const std::map<std::string, at::Tensor>& state, std::int64_t steps) {
  const at::NoGradGuard no_grad;
  Impl& s = *impl_;
  std::vector<std::string> wanted;
  const auto check = [&](const std::string& name, const at::Tensor& like) {
    const auto found = state.find(name);
    if (found == state.end()) throw FormatError(fmt::format("optimizer state: {}: missing, wanted {}", name, describe(like)));
    if (found->second.sizes() != like.sizes() || found->second.scalar_type() != like.scalar_type()) {
      throw FormatError(fmt::format("optimizer state: {}: {}, wanted {}", name, describe(found->second), describe(like)));
    }
    wanted.push_back(name);
  };
  for (const Impl::Trained& parameter : s.trained) {
    if (parameter.has_master()) check("masters/" + parameter.name, parameter.master);
    if (steps == 0) continue;
    for (const auto& moment : s.moment_names()) check(moment + "/" + parameter.name, parameter.master);
  }
  std::sort(wanted.begin(), wanted.end());
  for (const auto& [name, value] : state) {
    if (!std::binary_search(wanted.begin(), wanted.end(), name)) {
      throw FormatError(fmt::format("optimizer state: {}: this run's optimizer has no such entry", name));
    }
  }

  s.steps = steps;
  s.torch->state().clear();
  for (const Impl::Trained& parameter : s.trained) {
    if (parameter.has_master()) at::Tensor(parameter.master).copy_(state.at("masters/" + parameter.name));
    if (steps > 0 && !s.moment_names().empty()) s.set_moments(parameter, state);
  }
  s.write_weights();
}

}  // namespace longstraw::core::optim
