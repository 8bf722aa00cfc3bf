// longstraw verify: how far is each arm's gradient from the reference's, on one batch of a real model?

#include "app/arms.h"
#include "app/command_line.h"
#include "app/interrupt.h"
#include "app/output.h"
#include "app/read_batch.h"
#include "app/sample_batch.h"
#include "app/verify_run.h"

#include "core/base/atomic_file.h"
#include "longstraw/objective.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace longstraw::app {
namespace {

namespace fs = std::filesystem;
using core::data::Batch;

struct VerifyOptions {
  ConfigOptions config;
  std::string out = "out/verify";
};

void require_gate(const std::vector<std::string>& gate) {
  if (gate.empty()) throw ConfigError("compare.gate: is empty, no arm would decide");
  for (const auto& name : gate) {
    const auto arm = core::config::value_named<Arm>(name);
    if (!arm || *arm == Arm::kReference) {
      throw ConfigError(fmt::format("compare.gate: got {}, wanted detached, tail or exact", name));
    }
  }
}

// The first prompt whose responses differ in reward.
Batch sample_one_group(PromptSampler& sampler, const core::model::Decoder& decoder, const RunConfig& config, const fs::path& folder,
                       Progress& progress) {
  for (size_t row = 0; row < sampler.prompts(); ++row) {
    const SampledGroup sampled = sampler.sample(decoder, row);
    if (has_no_gradient({sampled.group}, config.objective)) {
      progress.say(fmt::format("  prompt {}: all rewards are equal, so there is no gradient; taking the next prompt",
                               sampled.group.prompt_id));
      continue;
    }
    write_sampled(folder / "rollouts.jsonl", {sampled});
    return {sampled.group};
  }
  throw FormatError(
      fmt::format("{}: none of the {} prompts got responses of different reward, so there is no gradient to compare; wanted "
                  "other prompts, a finer reward, a higher rollout.temperature or more rollout.num_generations",
                  *config.data.prompts, sampler.prompts()));
}

Batch given_batch(const RunConfig& config) {
  const Batch batch = read_batch(config);
  if (has_no_gradient(batch, config.objective)) {
    throw FormatError(
        fmt::format("{}: rewards are equal in every group, so there is no gradient to compare", *config.data.rollouts));
  }
  return batch;
}

void write_text(const fs::path& path, const std::string& text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

ExitStatus run_verify(const VerifyOptions& options, const RunConfig& config) {
  require_gate(config.compare.gate);
  check_objective(config.objective);
  if (!config.data.rollouts && !config.data.prompts) {
    throw ConfigError("data: neither rollouts nor prompts is given, wanted one of them");
  }
  const fs::path folder = options.out;
  require_writable_folder(folder);
  for (const char* name : {"reference.h5", "detached.h5", "tail.h5", "exact.h5", "noise.h5"})
    require_writable_record(folder / name);
  vocabulary(config);  // an unusable config.json is found before anything is started

  Progress progress;
  Batch batch;
  std::unique_ptr<core::model::Decoder> decoder;
  if (config.data.rollouts) {
    batch = given_batch(config);
    decoder = open_model(config.model, config.lora, progress);
  } else {
    PromptSampler sampler(config, progress);
    decoder = open_model(config.model, config.lora, progress);
    batch = sample_one_group(sampler, *decoder, config, folder, progress);
  }
  // Reports of an earlier run say nothing about the records that now replace its own.
  for (const char* name : {"report.json", "report.txt"}) fs::remove(folder / name);
  const compare::VerifyInputs inputs = run_arms(config, std::move(decoder), batch, folder, progress);

  progress.begin("comparing");
  const compare::VerifyReport report = compare::verify_records(inputs);
  const std::string text = compare::verify_text(report);
  {
    const WritingResults signals_wait;
    write_text(folder / "report.json", compare::verify_json(report).dump(2) + "\n");
    write_text(folder / "report.txt", text);
  }
  progress.done("report and records are in " + folder.string());
  fmt::print("{}", text);
  return report.exit_status();
}

}  // namespace

void add_verify(CLI::App& program, Action& chosen) {
  CLI::App& verb = *program.add_subcommand("verify", "run reference, detached, tail and exact on one batch, and compare them");
  const auto options = std::make_shared<VerifyOptions>();
  verb.add_option("--out", options->out,
                  "folder for reference.h5, detached.h5, tail.h5, exact.h5, noise.h5 (the reference with less rounding), "
                  "report.json, report.txt and, when responses are sampled, rollouts.jsonl")
      ->capture_default_str()
      ->type_name("DIR");
  add_config_options(verb, options->config);
  RunConfig defaults;
  defaults.longstraw.self_check = SelfCheck::kFirstStep;
  defaults.record.trace = true;
  choose(verb, chosen, options, run_verify, defaults);
}

}  // namespace longstraw::app
