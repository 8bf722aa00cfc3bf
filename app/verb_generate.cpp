// longstraw generate: rollouts to JSONL, sampled from the captured prompt state, scored when a reward is given.

#include "app/arms.h"
#include "app/command_line.h"
#include "app/output.h"
#include "app/sample_batch.h"

#include <fmt/format.h>

#include <algorithm>

namespace longstraw::app {
namespace {

struct GenerateOptions {
  ConfigOptions config;
  std::string out;
  int64_t num_prompts = 0;
};

std::string rewards_of(const SampledGroup& sampled) {
  std::string text;
  for (const auto& response : sampled.group.responses) {
    text += response.reward ? fmt::format(" {:.3g}", *response.reward) : " none";
  }
  return text;
}

ExitStatus run_generate(const GenerateOptions& options, const RunConfig& config) {
  if (options.out.empty()) throw ConfigError("--out: not given, wanted a file for the rollouts");
  require_writable_file(options.out);
  Progress progress;
  PromptSampler sampler(config, progress);
  const auto decoder = open_model(config.model, config.lora, progress);
  const size_t rows = options.num_prompts > 0 ? std::min(size_t(options.num_prompts), sampler.prompts()) : sampler.prompts();
  std::vector<SampledGroup> groups;
  for (size_t row = 0; row < rows; ++row) {
    groups.push_back(sampler.sample(*decoder, row));
    if (config.data.reward) progress.say("  rewards:" + rewards_of(groups.back()));
  }
  write_sampled(options.out, groups);
  fmt::print("{}\n", options.out);
  return ExitStatus::kWithinBounds;
}

}  // namespace

void add_generate(CLI::App& program, Action& chosen) {
  CLI::App& verb = *program.add_subcommand("generate", "sample responses to prompts and score them, as a rollouts file");
  const auto options = std::make_shared<GenerateOptions>();
  options->config.unscored = true;
  add_shortcut(verb, options->config, "--model", "model.path", "checkpoint folder");
  add_shortcut(verb, options->config, "--prompts", "data.prompts", "JSONL of prompts", {"data.rollouts"});
  add_shortcut(verb, options->config, "--reward", "data.reward",
               "reward function, FILE.py:FUNCTION or command:PROGRAM ARGUMENTS; without it nothing is scored");
  verb.add_option("--out", options->out, "the rollouts file to write (JSONL)")->type_name("FILE.jsonl");
  verb.add_option("--num-prompts", options->num_prompts, "only the first N prompts; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->type_name("N");
  add_config_options(verb, options->config);
  choose(verb, chosen, options, run_generate);
}

}  // namespace longstraw::app
