// longstraw gradients: one optimizer step's gradient of anyone's checkpoint and rollouts, as a record.

#include "app/arms.h"
#include "app/command_line.h"
#include "app/output.h"
#include "app/read_batch.h"
#include "app/write_record.h"

#include "longstraw/objective.h"

#include <fmt/format.h>

namespace longstraw::app {
namespace {

struct GradientsOptions {
  ConfigOptions config;
  std::string arm;
  std::string reference_cut = "none";
  std::string out;
};

std::optional<int64_t> cut_of(const std::string& name, const RunConfig& config, const core::data::Batch& batch) {
  if (name == "detached") return 0;
  if (name == "tail") return tail_tokens(config, batch);
  return {};
}

ExitStatus run_gradients(const GradientsOptions& options, const RunConfig& config) {
  if (options.arm.empty()) throw ConfigError("--arm: not given, wanted reference, detached, tail or exact");
  if (options.out.empty()) throw ConfigError("--out: not given, wanted a file for the record");
  const Arm arm = *core::config::value_named<Arm>(options.arm);
  if (options.reference_cut != "none" && arm != Arm::kReference) {
    throw ConfigError("--reference-cut: only the reference arm has one");
  }
  check_objective(config.objective);
  require_writable_record(options.out);
  Progress progress;
  const core::data::Batch batch = read_batch(config);
  if (has_no_gradient(batch, config.objective)) {
    progress.say("no response has an advantage (equal rewards in every group): the gradient is zero");
  }
  const auto decoder = open_model(config.model, config.lora, progress);
  const auto result = run_arm(arm, *decoder, batch, config, progress, cut_of(options.reference_cut, config, batch));
  // The comparator tells arms apart by this name.
  const std::string name = options.reference_cut == "none" ? options.arm : "reference_" + options.reference_cut;
  write_record(options.out, {.arm = name, .config = config, .decoder = *decoder, .batch = batch, .result = result});
  fmt::print("{}\n", options.out);
  return ExitStatus::kWithinBounds;
}

}  // namespace

void add_gradients(CLI::App& program, Action& chosen) {
  CLI::App& verb = *program.add_subcommand("gradients", "one step's gradient of given rollouts, written as a record");
  const auto options = std::make_shared<GradientsOptions>();
  add_shortcut(verb, options->config, "--model", "model.path", "checkpoint folder");
  add_shortcut(verb, options->config, "--rollouts", "data.rollouts", "JSONL of responses", {"data.prompts"});
  verb.add_option("--arm", options->arm, "way to get the gradient")
      ->check(CLI::IsMember({"reference", "detached", "tail", "exact"}));
  verb.add_option("--out", options->out, "the record to write (HDF5); an older record is replaced")->type_name("FILE.h5");
  verb.add_option("--reference-cut", options->reference_cut,
                  "cut the reference's prompt graph where the detached or the tail arm does: a second oracle for them")
      ->check(CLI::IsMember({"none", "detached", "tail"}))
      ->capture_default_str();
  add_config_options(verb, options->config);
  choose(verb, chosen, options, run_gradients);
}

}  // namespace longstraw::app
